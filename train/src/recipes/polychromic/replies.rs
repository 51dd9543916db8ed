//! Sets of replies as the policy gradient sees them: how likely each is, and how much its tokens count.

use crate::models::decoder::{Decoder, Places};
use engine::{DType, Recorder, Var};

/// Replies that were sampled: ids [n, time], and reply, u8 [n, time], 1 where a token was.
#[derive(Clone, Copy)]
pub struct Replies<'g> {
    pub ids: Var<'g>,
    pub reply: Var<'g>,
    pub places: Places<'g>,
}

impl<'g> Replies<'g> {
    /// As they are fed.
    pub fn fed(r: &'g Recorder, shape: &[usize]) -> Replies<'g> {
        let feed = |name: &str| r.feed(name, shape, DType::I32);
        Replies {
            ids: feed("set_ids"),
            reply: r.feed("set_reply", shape, DType::U8),
            places: Places { position: feed("set_position"), until: feed("set_until") },
        }
    }

    /// The mean hidden state of each reply's tokens: f32 [n, dim].
    pub fn mean_hidden(&self, d: &Decoder<'_, 'g>) -> Var<'g> {
        let hidden = d.hidden(self.ids, Some(self.places));
        let (n, time, dim) = (hidden.shape()[0], hidden.shape()[1], hidden.shape()[2]);
        d.r.typed(|| {
            let counts = self.reply.cast(DType::F32);
            let length = counts.sum_axis(1).max(d.r.full(&[1, 1], 1.0));
            let share = (counts / length).reshape(&[n, time, 1]);
            (hidden.cast(DType::F32) * share).sum_axis(1).reshape(&[n, dim])
        })
    }

    /// What each token but the first was predicted from: hidden states [n, time - 1, dim], the tokens, and 1 where one is a reply's.
    fn predicted(&self, d: &Decoder<'_, 'g>) -> (Var<'g>, Var<'g>, Var<'g>) {
        let time = self.ids.shape()[1];
        let next = |v: Var<'g>| v.slice(1, 1, time);
        let hidden = d.hidden(self.ids, Some(self.places)).slice(1, 0, time - 1);
        (hidden, next(self.ids), next(self.reply).cast(DType::F32))
    }

    /// Sum of log p of each reply's tokens: `[n]`.
    pub fn log_prob(&self, d: &Decoder<'_, 'g>) -> Var<'g> {
        let (hidden, tokens, counts) = self.predicted(d);
        let shape = tokens.shape();
        let rows = shape.iter().product();
        let logits = d.logits(hidden.reshape(&[rows, d.shape.dim]));
        -(logits.cross_entropy(tokens.reshape(&[rows])).reshape(&shape) * counts).sum_axis(1).reshape(&shape[..1])
    }

    /// The policy gradient's loss, for sets of replies one after another: minus the mean over replies of advantage times log p of a token, in the
    /// mean over the reply's. The advantage of a set's replies is how far its score `[sets]` is above the baseline `[1]`. As each token's weight is
    /// known beforehand, this is a sum of weighted cross-entropies.
    pub fn policy_loss(&self, d: &Decoder<'_, 'g>, scores: Var<'g>, baseline: Var<'g>) -> Var<'g> {
        let (n, sets) = (self.ids.shape()[0], scores.dim(0));
        let (hidden, tokens, counts) = self.predicted(d);
        let weight = d.r.typed(|| {
            let above = scores - engine::mutant!("policy-gradient-without-baseline", baseline, d.r.zeros(&[1]));
            let advantage = engine::mutant!("policy-gradient-of-the-other-sign", above, -above);
            let advantage = advantage.reshape(&[sets, 1]).expand(&[sets, n / sets]).reshape(&[n, 1]);
            let length = self.reply.cast(DType::F32).sum_axis(1).max(d.r.full(&[1, 1], 1.0));
            counts * (advantage / (engine::mutant!("policy-gradient-not-by-length", length, d.r.full(&[n, 1], 1.0)) * n as f32))
        });
        d.loss(hidden, tokens, weight)
    }
}
