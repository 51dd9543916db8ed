//! The examples that are being learned, and what has been thought of each: State, so that a step is one program whose shapes never change.
//! Slots whose example is done take a fresh one from what the step is fed; the rest of that is dropped.

use super::model::{Hrm, HrmConfig, Segment, Thought};
use crate::recipe::sums;
use engine::ops::pointwise::expr::Expr;
use engine::ops::pointwise::{Bin, Un, record};
use engine::{DType, Init, Recorder, Var};

#[derive(Clone, Copy)]
pub struct Carry<'g> {
    pub thought: Thought<'g>,
    /// i32 [batch, seq]
    pub ids: Var<'g>,
    pub targets: Var<'g>,
    /// f32 [batch]: how many an example has had, and how many it must have at least.
    pub segments: Var<'g>,
    pub minimum: Var<'g>,
    /// f32 [batch]: 1 where the example is done with.
    pub done: Var<'g>,
}

impl<'g> Carry<'g> {
    /// What the last step left of its micro-batch `m`, which has slots of its own. Before the first step, every slot is done.
    pub fn states(r: &'g Recorder, c: &HrmConfig, batch: usize, m: usize) -> Carry<'g> {
        let of = if m == 0 { String::new() } else { format!("{m}.") };
        let state =
            |name: &str, shape: &[usize], dtype: DType, value: f32| r.state(&format!("carry.{of}{name}"), shape, dtype, Init::Full(value));
        let wide = |name: &str| state(name, &[batch, c.seq, c.dim], DType::F32, 0.0);
        let cells = |name: &str| state(name, &[batch, c.seq], DType::I32, 0.0);
        let slots = |name: &str, value: f32| state(name, &[batch], DType::F32, value);
        Carry {
            thought: Thought { high: wide("high"), low: wide("low") },
            ids: cells("ids"),
            targets: cells("targets"),
            segments: slots("segments", 0.0),
            minimum: slots("minimum", 1.0),
            done: slots("done", 1.0),
        }
    }

    /// Slots that are done take a fresh example and start over. A minimum of segments is drawn from the feed `rng`; without one it is 1.
    pub fn refilled(&self, m: &Hrm<'_, 'g>, ids: Var<'g>, targets: Var<'g>, rng: Option<Var<'g>>) -> Carry<'g> {
        let (r, b) = (m.r, self.done.dim(0));
        let start = m.start();
        r.scope("refill", || {
            let (row, thought) = (self.done.reshape(&[b, 1]), self.done.reshape(&[b, 1, 1]));
            Carry {
                thought: Thought {
                    high: thought.choose(start.high, self.thought.high),
                    low: engine::mutant!("hrm-carry-not-reset", thought.choose(start.low, self.thought.low), self.thought.low),
                },
                ids: row.choose(ids, self.ids).cast(DType::I32),
                targets: row.choose(targets, self.targets).cast(DType::I32),
                segments: self.done.choose(r.zeros(&[b]), self.segments),
                minimum: match rng {
                    Some(rng) => self.drawn(m.c, rng),
                    None => self.done.choose(r.full(&[b], 1.0), self.minimum),
                },
                done: self.done,
            }
        })
    }

    /// For slots that are done: 1, or with the chance `explore` one of 2 to `max_segments`.
    fn drawn(&self, c: &HrmConfig, rng: Var<'g>) -> Var<'g> {
        let r = rng.recorder();
        let sites = [r.new_site(), r.new_site()];
        let expr = Expr::of(2, |e, x| {
            let [chance, share] = sites.map(|site| e.random(site, 2));
            let (explore, one, two) = (e.c(c.explore as f32), e.c(1.0), e.c(2.0));
            let more = e.scale(share, (c.max_segments - 1) as f32);
            let more = e.un(Un::Floor, more);
            let (explores, longer) = (e.bin(Bin::Lt, chance, explore), e.add(more, two));
            let drawn = e.select(explores, longer, one);
            e.select(x[0], drawn, x[1])
        });
        record(expr, vec![DType::F32], &[self.done, self.minimum, rng])[0]
    }

    /// After a segment: an example is done at the segment limit, or if it has had its minimum and thinks that its answer is right.
    pub fn after(&self, s: &Segment<'g>, max_segments: usize) -> Carry<'g> {
        let r = self.done.recorder();
        r.typed(|| {
            let segments = self.segments + 1.0;
            let limit = r.full(&[1], max_segments as f32 - engine::mutant!("hrm-thinks-a-segment-too-long", 0.5, -0.5)).less(segments);
            let sure = r.zeros(&[1]).less(s.halt) * self.minimum.less(segments + 0.5);
            Carry { thought: s.thought, segments, done: limit.max(sure), ..*self }
        })
    }

    fn all(&self) -> [Var<'g>; 7] {
        [self.thought.high, self.thought.low, self.ids, self.targets, self.segments, self.minimum, self.done]
    }

    /// What the next step finds, where a step is one batch.
    pub fn keep(&self, next: &Carry<'g>) {
        Carry::turn(&[*self], next);
    }

    /// The same of micro-batches: the first of these was read, and what comes of it goes to the end (see `sums::turn`).
    pub fn turn(line: &[Carry<'g>], next: &Carry<'g>) {
        for (i, value) in next.all().into_iter().enumerate() {
            sums::turn(&line.iter().map(|carry| carry.all()[i]).collect::<Vec<_>>(), value);
        }
    }
}
