//! A golden file's steps, computed here: supervised loss plus weight times the policy gradient's, on replies that the file holds.

use super::{Objective, PolychromicConfig, Replies};
use crate::config::{ConfigError, Section};
use crate::golden::{self, Golden, differentiated};
use crate::models::decoder::{Base, Decoder, Places, Rows};
use crate::models::{Lora, Shape};
use crate::recipe::{Computed, TrainError};
use crate::sample::nucleus;
use engine::{DType, Data, Device, Recorder, Switches, Var};

/// The recorded models and the settings of a step; the rest is fed.
struct Steps {
    shape: Shape,
    lora: Lora,
    objective: Objective,
    /// [batch, time] of the supervised rows; `replies`: the same of the replies with their prompts.
    rows: [usize; 2],
    replies: [usize; 2],
    prompt: usize,
    width: usize,
}

impl Steps {
    fn decoder<'g>(&self, r: &'g Recorder) -> Decoder<'_, 'g> {
        Decoder { shape: &self.shape, lora: Some(&self.lora), base: Base::Loaded, r, rng: None }
    }

    fn replies<'g>(&self, r: &'g Recorder) -> Replies<'g> {
        Replies::fed(r, &self.replies)
    }

    fn score<'g>(&self, r: &'g Recorder) -> Var<'g> {
        r.feed("embeddings", &[self.objective.prompts, self.objective.replies, self.width], DType::F32).diversity()
    }

    fn losses<'g>(&self, r: &'g Recorder) -> Vec<(&'static str, Var<'g>)> {
        let d = self.decoder(r);
        let hidden = d.hidden(r.feed("ids", &self.rows, DType::I32), Some(Places::fed(r, self.rows[0], self.rows[1])));
        let ce = d.loss(hidden, r.feed("targets", &self.rows, DType::I32), r.feed("weight", &[1], DType::F32));
        let policy = self.replies(r).policy_loss(&d, r.typed(|| self.score(r)), r.feed("baseline", &[1], DType::F32));
        vec![("loss", ce + policy * self.objective.weight as f32), ("ce", ce), ("policy", policy)]
    }

    fn outputs<'g>(&self, r: &'g Recorder) -> Vec<(&'static str, Var<'g>)> {
        let (d, all) = (self.decoder(r), self.replies(r));
        let (n, p) = (self.replies[0], self.prompt);
        // A prompt attends to its own part of the row, and nothing after it.
        let part = |v: Var<'g>| v.slice(1, 0, p);
        let places = Places { position: part(all.places.position), until: part(all.places.until) };
        let last = d.hidden(part(all.ids), Some(places)).slice(1, p - 1, p).reshape(&[n, self.shape.dim]);
        vec![("diversity", self.score(r)), ("log_prob", all.log_prob(&d)), (LOGITS, d.logits(last))]
    }
}

/// Becomes `next_probabilities`.
const LOGITS: &str = "next_logits";

pub fn steps(file: &Golden, switches: &Switches, device: &Device) -> Result<Computed, TrainError> {
    let bad = |m: &str| TrainError::Other(format!("this golden file {m}"));
    let mut fields = file.config.as_object().cloned().ok_or_else(|| bad("has a config that is no table"))?;
    let own = ["weight", "every", "prompts", "replies", "new_tokens", "temperature", "top_p", "baseline_decay"];
    let mut objective: serde_json::Map<_, _> = own.iter().filter_map(|k| fields.remove_entry(*k)).collect();
    // The reference knows none of those that follow.
    fields.insert("base".into(), "".into());
    fields.insert("pretrain".into(), 0.into());
    fields.insert("bits".into(), 16.into());
    fields.insert("dropout".into(), 0.0.into());
    let unknown = |e: ConfigError| bad(&format!("has a config that polychromic does not know: {e}"));
    let c = PolychromicConfig::from_json("model", &fields.into()).map_err(unknown)?;
    c.check()?;
    objective.extend([("prompt_tokens".into(), 0.into()), ("eval_prompts".into(), 0.into())]);
    objective.extend([("encoder".into(), "".into()), ("eval_file".into(), "".into())]);
    let objective = Objective::from_json("objective", &objective.into()).map_err(unknown)?;

    let shape = |name: &str, rank: usize| file.shape(name).filter(|s| s.len() == rank && s.iter().all(|&n| n > 0));
    let shapes = (shape("input/ids", 2), shape("input/set_ids", 2), shape("input/embeddings", 3));
    let (Some(rows), Some(replies), Some(embedded)) = shapes else { return Err(bad("has no ids, set_ids or embeddings")) };
    let sets = [objective.prompts, objective.replies];
    let prompt = replies[1].saturating_sub(objective.new_tokens);
    if objective.replies < 2
        || embedded[..2] != sets
        || sets.iter().product::<usize>() != replies[0]
        || prompt == 0
        || objective.new_tokens == 0
    {
        return Err(bad("has replies or embeddings that do not fit its config"));
    }
    let ids = |name: &str, least: i64, shape: &[usize]| {
        let found = file
            .i32(&format!("input/{name}"))
            .filter(|v| file.shape(&format!("input/{name}")).is_some_and(|s| s == shape) && !v.is_empty());
        let inside = |v: &&Vec<i32>| v.iter().all(|&t| (least..c.vocab as i64).contains(&(t as i64)));
        found.as_ref().filter(inside).cloned().ok_or_else(|| bad(&format!("has no {name} that fits its config")))
    };
    let mask = |name: &str, shape: &[usize]| {
        let found = file.f32(&format!("input/{name}")).filter(|_| file.shape(&format!("input/{name}")).is_some_and(|s| s == shape));
        found.map(|v| v.iter().map(|&x| x != 0.0).collect::<Vec<bool>>()).ok_or_else(|| bad(&format!("has no {name} that fits its ids")))
    };
    let (tokens, targets, set_ids) = (ids("ids", 0, &rows)?, ids("targets", -1, &rows)?, ids("set_ids", 0, &replies)?);
    let padded = Rows::padded(&mask("real", &rows)?, rows[1]);
    let set_padded = Rows::padded(&mask("set_real", &replies)?, replies[1]);
    let reply: Vec<u8> = mask("set_reply", &replies)?.into_iter().map(u8::from).collect();
    let (Some(embeddings), Some(baseline)) = (file.f32("input/embeddings"), file.f32("input/baseline").filter(|b| b.len() == 1)) else {
        return Err(bad("has no embeddings or no baseline"));
    };
    let counted = targets.iter().filter(|t| **t >= 0).count();
    if counted == 0 {
        return Err(TrainError::AllMasked(0));
    }
    let weight = [1.0 / counted as f32];
    let feeds = [
        ("ids", Data::I32(&tokens)),
        ("targets", Data::I32(&targets)),
        ("weight", Data::F32(&weight)),
        ("position", Data::I32(&padded.position)),
        ("until", Data::I32(&padded.until)),
        ("set_ids", Data::I32(&set_ids)),
        ("set_reply", Data::U8(&reply)),
        ("set_position", Data::I32(&set_padded.position)),
        ("set_until", Data::I32(&set_padded.until)),
        ("embeddings", Data::F32(&embeddings)),
        ("baseline", Data::F32(&baseline)),
    ];
    let steps = Steps {
        shape: c.shape(),
        lora: c.lora(),
        rows: [rows[0], rows[1]],
        replies: [replies[0], replies[1]],
        prompt,
        width: embedded[2],
        objective,
    };
    let computed =
        golden::Steps { losses: &|r| steps.losses(r), outputs: &|r| steps.outputs(r), feeds: &feeds, frozen: &[], called: &str::to_string };
    let mut out = differentiated(file, switches, device, &computed)?;
    let logits = out.remove(&format!("output/{LOGITS}")).unwrap_or_default();
    let mut probabilities = vec![0.0; logits.len()];
    for (row, p) in logits.chunks(c.vocab).zip(probabilities.chunks_mut(c.vocab)) {
        let kept = nucleus(row, steps.objective.temperature as f32, steps.objective.top_p as f32);
        let mass: f64 = kept.iter().map(|k| k.1).sum();
        kept.into_iter().for_each(|(token, share)| p[token] = (share / mass) as f32);
    }
    out.insert("output/next_probabilities".into(), probabilities);
    Ok(out)
}
