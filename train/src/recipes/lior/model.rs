//! LIoR: a frozen encoder, a complex field, a metric and a rotor that learn from the difference between a free and a nudged phase, a ring
//! memory. What the numbers are is said by reference/lior.py; names of parameters and states are the same there.
//!
//! A phase runs the encoder at every step, with the field's mean size as its gain. The field never reads what the encoder makes of it, so a
//! phase is: the field through all its steps, which gives every step's gain; the encoder over all steps as one batch, or over some of them at a
//! time; then the retrieval over all steps. Nothing is left out, and the numbers are those of the steps one by one.

use super::ops::evolve::evolution;
use super::ops::retrieve::{PLANES, retrieval};
use super::ops::ring::{count, ring_write};
use crate::config::{ConfigError, NORM_EPS, Section};
use crate::recipe::{Feeds, sums};
use crate::section;
use engine::ops::attention::attention;
use engine::ops::concat::concat;
use engine::ops::pointwise::{Bin, Un, pointwise};
use engine::{DType, Init, Recorder, Var};
use std::f32::consts::PI;
use std::ops::RangeInclusive;

section! {
    /// The encoder, the field, the metric and the rotor, and how they learn.
    pub struct LiorConfig {
        /// Tokens of the vocabulary; at least those of the data's tokenizer.
        pub vocab: usize = 0, in 1..=1 << 24, [data];
        /// Width of the encoder.
        pub dim: usize = 512, in 1..=1 << 14;
        /// Layers of the encoder.
        pub layers: usize = 4, in 1..=1 << 10;
        /// Attention heads of the encoder.
        pub heads: usize = 8, in 1..=1 << 10;
        /// Tokens of a window.
        pub seq: usize = 128, in 1..=1 << 16;
        /// Tokens after the window, towards which the nudged phase is pulled.
        pub after: usize = 8, in 1..=1 << 16;
        /// Coordinates of the space.
        pub n: usize = 8, in 1..=256;
        /// Layers of the rotor, each of n / 2 planes.
        pub rotor_layers: usize = 2, in 1..=256;
        /// Slots of the ring of (coordinate, state).
        pub memory: usize = 2048, in 1..=1 << 24;
        /// Sizes of the complex field: two inner axes, height and width.
        pub field: [usize; 4] = [8, 8, 16, 16], in 1..=1 << 12;
        /// Steps of a phase.
        pub steps: usize = 64, in 1..=1 << 14;
        /// Rows (tokens of all sequences, at one or more steps) that the encoder takes at a time: enough to keep a GPU busy, and no more memory
        /// than that.
        pub rows: usize = 16384, in 1..=1 << 24;
        /// Inverse temperature of the retrieval from the memory.
        pub beta: f64 = 5.0, in NUMBER;
        /// How far the nudged phase is pulled towards what follows the window.
        pub nudge: f64 = 0.1, in NUMBER;
        /// The contrastive estimate is (nudged - free) / nudge_beta.
        pub nudge_beta: f64 = 0.1, in DIVISOR;
        /// The rotor's learning rate, as a share of the metric's.
        pub rotor_rate: f64 = 0.01, in NUMBER;
        /// Share by which the metric's logarithms and the rotor's angles shrink with each window that is learned from; falls as the rate does. 0: none.
        pub decay: f64 = 0.0, in 0.0..=1.0;
        /// Holds the metric's geometric mean at 1: the scale of all coordinates together is nothing that could be learned.
        pub gauge: bool = false;
        /// Only every so many windows are nudged and learned from; the others move the field and fill the memory.
        pub nudge_every: u64 = 1, in 1..=1 << 20;
        /// Whether the memory notes the token that follows each window, and evaluations say how often what is nearest to a held-out window was followed by the
        /// same one.
        pub probe: bool = false;
        /// A run that has trained an encoder of this size (model.pretrain, the preset encoder): its encoder is taken when the run begins, and frozen. Empty: one
        /// that is drawn at random.
        pub encoder: String = String::new();
        /// Trains nothing but the encoder, to name the next token, by AdamW: for model.encoder of another run.
        pub pretrain: bool = false;
        /// Time step of the field.
        pub dt: f64 = 0.05, in NUMBER;
        /// Mass of the field.
        pub mass: f64 = 1.0, in DIVISOR;
        /// Drag of the field: its strength.
        pub memory_alpha: f64 = 0.5, in NUMBER;
        /// Drag of the field: how much each window of history adds.
        pub memory_lambda: f64 = 0.05, in NUMBER;
        /// Windows after which the drag grows no more.
        pub history: usize = 20, in 0..=1 << 20;
        /// Epsilon that is added to divisors in the geometry.
        pub eps: f64 = 1e-8, in NORM_EPS;
        /// What the encoder's norms add to the variance.
        pub norm_eps: f64 = 1e-5, in NORM_EPS;
    }
}

const NUMBER: RangeInclusive<f64> = -1e6..=1e6;
/// What is divided by.
const DIVISOR: RangeInclusive<f64> = 1e-30..=1e6;

impl LiorConfig {
    /// Planes of the rotor, over all its layers.
    pub fn planes(&self) -> usize {
        self.rotor_layers * (self.n / 2)
    }

    pub fn check(&self) -> Result<(), ConfigError> {
        let bad = |m: String| Err(ConfigError::Invalid(m));
        self.in_range("model")?;
        if !self.dim.is_multiple_of(self.heads) {
            return bad(format!("model.dim = {} does not divide by model.heads = {}", self.dim, self.heads));
        }
        if self.n < 2 || self.n > self.dim {
            return bad(format!("model.n = {}: from 2 (a plane has two axes) to model.dim = {}", self.n, self.dim));
        }
        if self.planes() > PLANES {
            return bad(format!("model.rotor_layers x (n / 2) = {} planes: at most {PLANES}", self.planes()));
        }
        if self.after > self.seq {
            return bad(format!("model.after = {} is more than model.seq = {}: there is no position for the rest", self.after, self.seq));
        }
        if self.pretrain && !self.encoder.is_empty() {
            return bad(format!("model.encoder = {}: a run that trains the encoder (model.pretrain) has no use for another", self.encoder));
        }
        Ok(())
    }

    /// What a step of the field is multiplied with after so many windows: the drag grows with them.
    pub(super) fn k(&self, windows: usize) -> f32 {
        let drag = self.memory_alpha * (windows as f64).ln_1p() * self.memory_lambda;
        (self.dt * (1.0 - drag.min(1.0)) / (2.0 * self.mass)) as f32
    }

    /// Steps that the encoder takes at a time.
    fn chunk(&self, batch: usize) -> usize {
        let most = (self.rows / (batch * self.seq)).clamp(1, self.steps);
        self.steps.div_ceil(self.steps.div_ceil(most)) // in parts of one size, as far as that goes
    }

    /// `batch`: sequences of a window, or of all windows of a step.
    pub fn check_batch(&self, batch: usize, accumulate: usize, steps: u64) -> Result<(), ConfigError> {
        let (all, each) = (batch.saturating_mul(accumulate), if accumulate == 1 { "" } else { " x train.accumulate" });
        if all > self.memory {
            return Err(ConfigError::Invalid(format!(
                "train.batch{each} = {all} is more than model.memory = {}: a step writes a slot for each sequence",
                self.memory
            )));
        }
        if steps.saturating_mul(all as u64) > i32::MAX as u64 {
            return Err(ConfigError::Invalid(format!(
                "train.steps = {steps} steps of train.batch{each} = {all} write more slots than a counter of 32 bits counts"
            )));
        }
        Ok(())
    }
}

/// How many windows in a row, up to now, had a LIoR that is not finite: of the reference's state there is no such number.
pub(super) const BROKEN: &str = "not_finite_in_row";

/// Records a window's programs on states of these names.
pub struct Lior<'a, 'g> {
    pub c: &'a LiorConfig,
    pub r: &'g Recorder,
    pub batch: usize,
    /// Windows of a step: each leaves numbers of its own, and the step learns from all.
    pub accumulate: usize,
}

/// What a phase gives: means over its steps, and what is left at its end.
struct Phase<'g> {
    /// [batch]
    lior: Var<'g>,
    speed: Var<'g>,
    /// [batch, n]
    velocity: Var<'g>,
    slope: Var<'g>,
    /// Of every step: [steps].
    gain: Var<'g>,
    re: Var<'g>,
    im: Var<'g>,
    /// Of the last step: [batch, n].
    query: Var<'g>,
    /// The encoder's last rows, before the last norm: [batch, seq, dim].
    hidden: Var<'g>,
    /// What each token counts in its row: [batch, seq].
    weight: Var<'g>,
}

/// Learned, and kept from window to window.
struct Geometry<'g> {
    metric: Var<'g>,
    rotor: Var<'g>,
    coordinates: Var<'g>,
    states: Var<'g>,
    filled: Var<'g>,
    windows: Var<'g>,
    re: Var<'g>,
    im: Var<'g>,
}

impl<'g> Lior<'_, 'g> {
    fn geometry(&self) -> Geometry<'g> {
        let (c, r) = (self.c, self.r);
        let field = |name: &str| r.state(name, &c.field, DType::F32, Init::Normal { std: 0.5f32.sqrt() });
        let count = |name: &str| r.state(name, &[1], DType::I32, Init::Full(0.0));
        Geometry {
            metric: r.param("g", &[c.n], Init::Full(1.0)),
            rotor: r.param("theta", &[c.planes()], Init::Full(0.0)),
            coordinates: r.state("memory_coord", &[c.memory, c.n], DType::F32, Init::Full(0.0)),
            states: r.state("memory_state", &[c.memory, c.dim], DType::F32, Init::Full(0.0)),
            filled: count("filled"),
            windows: count("windows"),
            re: field("field.re"),
            im: field("field.im"),
        }
    }

    /// What one program leaves for the next.
    fn between(&self, name: &str, shape: &[usize]) -> Var<'g> {
        self.r.state(&format!("scratch/{name}"), shape, DType::F32, Init::Full(0.0))
    }

    fn leave(&self, name: &str, v: Var<'g>) {
        self.r.update(self.between(name, &v.shape()), v);
    }

    /// The same of each of a step's windows, in line: the first is that of the window that is next (see `sums::turn`).
    fn line(&self, name: &str, shape: &[usize]) -> Vec<Var<'g>> {
        let of = |m: usize| if m == 0 { name.to_string() } else { format!("{name}.{m}") };
        (0..self.accumulate).map(|m| self.between(&of(m), shape)).collect()
    }

    /// Rows of all of a step's windows: [accumulate * batch, ..], of [batch, ..].
    fn rows(&self, name: &str, shape: &[usize]) -> Var<'g> {
        match &self.line(name, shape)[..] {
            [one] => *one,
            all => self.r.typed(|| concat(all, 0)),
        }
    }

    fn embedding(&self) -> Var<'g> {
        self.r.param("encoder.embedding", &[self.c.vocab, self.c.dim], Init::Normal { std: 0.02 })
    }

    /// The loss of an encoder that learns to name the next token, with its embedding as its head.
    pub fn next_token(&self) -> Var<'g> {
        let (c, r, tokens) = (self.c, self.r, self.batch * self.c.seq);
        let f = Feeds::new(r, self.batch, c.seq);
        // The mean size of a field as it is drawn: about the gain that the encoder will meet.
        let gain = r.full(&[1], PI.sqrt() / 2.0);
        let rows = r.scope("encoder", || self.encode(f.ids, gain).reshape(&[tokens, c.dim]).layer_norm(c.norm_eps as f32));
        r.scope("loss", || rows.linear_cross_entropy(self.embedding(), f.targets.reshape(&[tokens]), f.weight))
    }

    /// ids [batch, time] under each gain [steps] -> rows before the last norm [steps, batch, time, dim].
    fn encode(&self, ids: Var<'g>, gain: Var<'g>) -> Var<'g> {
        let (c, r) = (self.c, self.r);
        let (b, t, d, s) = (ids.shape()[0], ids.shape()[1], c.dim, gain.dim(0));
        let rows = s * b * t;
        let param = |name: &str, shape: &[usize], std: f64| r.param(&format!("encoder.{name}"), shape, Init::Normal { std: std as f32 });
        let wide = |n: usize| 1.0 / (n as f64).sqrt();
        let table = self.embedding();
        let position = param("position", &[c.seq, d], 0.02);
        let qkv = param("qkv", &[c.layers, 3 * d, d], wide(d));
        let out = param("out", &[c.layers, d, d], wide(d));
        let up = param("up", &[c.layers, 4 * d, d], wide(d));
        let down = param("down", &[c.layers, d, 4 * d], wide(4 * d));
        let eps = c.norm_eps as f32;
        // This does not depend on the gain, so common-subexpression elimination computes it once for all steps.
        let embedded = table.gather_rows(ids) + position.slice(0, 0, t);
        let mut x = (embedded.reshape(&[1, b, t, d]) * gain.reshape(&[s, 1, 1, 1])).reshape(&[rows, d]);
        for l in 0..c.layers {
            x = r.scope(&format!("layers.{l}"), || {
                let all = x.layer_norm(eps).linear(qkv.row(l));
                let part = |i: usize| all.slice(1, i * d, (i + 1) * d).reshape(&[s * b, t, c.heads, d / c.heads]);
                let a = attention(part(0), part(1), part(2), true, wide(d / c.heads) as f32);
                let x = x + a.reshape(&[rows, d]).linear(out.row(l));
                x + x.layer_norm(eps).linear(up.row(l)).gelu().linear(down.row(l))
            });
        }
        x.reshape(&[s, b, t, d])
    }

    /// nudge [batch, n], and `pull` [any, n], whose mean drives the field. Both phases record the same, so that a nudge of zero makes no difference, to
    /// the last bit.
    fn phase(&self, nudge: Var<'g>, pull: Var<'g>) -> Phase<'g> {
        let (c, r, b) = (self.c, self.r, self.batch);
        let g = self.geometry();
        let ids = r.feed("ids", &[b, c.seq], DType::I32);
        let counts = r.feed("mask", &[b, c.seq], DType::U8);
        let (re, im, gain) = r.scope("field", || {
            r.typed(|| {
                // One of a few numbers: an error in the last bit of k would rotate the field a little further at every step.
                let table = r.constant(&[c.history + 1, 1], (0..=c.history).map(|seen| c.k(seen)).collect());
                let seen = g.windows.cast(DType::F32).min(r.full(&[1], c.history as f32));
                let k = table.gather_rows(seen.cast(DType::I32)).reshape(&[1]);
                // Coordinate i of the mean nudge, over all of a step's windows, drives slice i (mod n) of the first axis.
                let drives: Vec<usize> = (0..c.field[0]).map(|i| i % c.n).collect();
                let source = self.chosen(pull.mean_axis(0).reshape(&[c.n]), &drives) * c.dt as f32;
                evolution(g.re, g.im, k, Some(source), c.steps)
            })
        });
        let (own, hidden) = r.scope("encoder", || {
            let (mut parts, mut last) = (vec![], None);
            let chunk = c.chunk(b);
            for first in (0..c.steps).step_by(chunk) {
                let x = self.encode(ids, gain.slice(0, first, (first + chunk).min(c.steps)));
                parts.push(x.layer_norm_columns(c.norm_eps as f32, c.n));
                last = Some(x);
            }
            let last = last.expect("a phase has steps");
            let end = last.shape()[0];
            let own = if parts.len() == 1 { parts[0] } else { r.typed(|| concat(&parts, 0)) };
            (own, last.slice(0, end - 1, end).reshape(&[b, c.seq, c.dim]))
        });
        r.scope("retrieval", || {
            r.typed(|| {
                let real = counts.cast(DType::F32);
                let weight = real / real.sum_axis(1);
                let query = (own * weight.reshape(&[1, b, c.seq, 1])).sum_axis(2).reshape(&[c.steps, b, c.n]) + nudge;
                let values = g.states.slice(1, 0, c.n); // of what is found only the coordinates are used
                let inputs = [query, own, counts, g.coordinates, values, g.filled, g.rotor, g.metric, gain];
                let [lior, speed, velocity, slope] = retrieval(&inputs, c.beta as f32, c.eps as f32)[..] else {
                    unreachable!("four outputs")
                };
                Phase { lior, speed, velocity, slope, gain, re, im, query: query.row(c.steps - 1), hidden, weight }
            })
        })
    }

    /// v [n] at these places.
    fn chosen(&self, v: Var<'g>, places: &[usize]) -> Var<'g> {
        let index = self.r.constant(&[places.len()], places.iter().map(|&p| p as f32).collect()).cast(DType::I32);
        v.reshape(&[v.dim(0), 1]).gather_rows(index).reshape(&[places.len()])
    }

    /// The phase on its own, what of it the memory will hold, and the nudge towards the coordinates of the tokens after the window.
    pub fn free(&self) {
        let (c, r, b) = (self.c, self.r, self.batch);
        let none = self.between("no_nudge", &[b, c.n]);
        let p = self.phase(none, none);
        let state = r.scope("state", || {
            let normed = p.hidden.layer_norm_columns(c.norm_eps as f32, c.dim);
            r.typed(|| (normed * p.weight.reshape(&[b, c.seq, 1])).sum_axis(1).reshape(&[b, c.dim]))
        });
        let after = r.feed("after", &[b, c.after], DType::I32);
        let nudge = r.scope("target", || {
            let after = self.encode(after, p.gain.slice(0, 0, 1));
            let places = after.layer_norm_columns(c.norm_eps as f32, c.n);
            r.typed(|| (places.reshape(&[b, c.after, c.n]).mean_axis(1).reshape(&[b, c.n]) - p.query) * c.nudge as f32)
        });
        let curvature = r.typed(|| p.gain.mean());
        let rows = [
            ("free.lior", p.lior),
            ("free.speed", p.speed),
            ("free.slope", p.slope),
            ("free.coordinate", p.query),
            ("free.state", state),
            ("nudge", nudge),
        ];
        // Numbers of tokens are exact in f32 as far as a vocabulary goes.
        let next = c.probe.then(|| ("free.next", r.typed(|| after.slice(1, 0, 1).cast(DType::F32))));
        rows.into_iter().chain(next).for_each(|(name, v)| sums::turn(&self.line(name, &v.shape()), v));
        // The field takes the same way in each of a step's windows.
        [("free.curvature", curvature), ("free.re", p.re), ("free.im", p.im)].into_iter().for_each(|(name, v)| self.leave(name, v));
    }

    /// The phase alone, on windows that nothing is learned from. Outputs: lior and speed [batch], coordinate [batch, n].
    pub fn evaluation(&self) {
        let none = self.between("eval.no_nudge", &[self.batch, self.c.n]);
        let p = self.phase(none, none);
        [("lior", p.lior), ("speed", p.speed), ("coordinate", p.query)].into_iter().for_each(|(name, v)| self.r.output(name, v));
    }

    /// The same phase from the same start, nudged.
    pub fn nudged(&self) {
        let shape = [self.batch, self.c.n];
        let line = self.line("nudge", &shape);
        let pull = self.rows("nudge", &shape);
        let p = self.phase(line[0], pull);
        if line.len() > 1 {
            sums::turn(&line, pull.slice(0, 0, self.batch));
        }
        [("nudged.lior", p.lior), ("nudged.slope", p.slope), ("nudged.velocity", p.velocity)]
            .into_iter()
            .for_each(|(name, v)| sums::turn(&self.line(name, &v.shape()), v));
    }

    /// What the difference teaches the metric and the rotor, and what every window leaves.
    pub fn update(&self) {
        self.r.typed(|| {
            let g = self.geometry();
            let learned = self.learn(&g);
            self.remember(&g, learned);
        });
    }

    /// The end of a window that nothing is learned from: its difference is that of the last which was nudged.
    pub fn passed(&self) {
        self.r.typed(|| {
            let g = self.geometry();
            self.remember(&g, [self.last_delta(), g.metric, g.rotor]);
        });
    }

    /// Where not every window is nudged: the difference of the last that was.
    fn last_delta(&self) -> Var<'g> {
        self.r.state("delta", &[1], DType::F32, Init::Full(0.0))
    }

    /// The difference between the phases, and the metric and the rotor as they are from here on.
    fn learn(&self, g: &Geometry<'g>) -> [Var<'g>; 3] {
        let (c, r, b) = (self.c, self.r, self.batch);
        let rows = |name: &str| self.rows(name, &[b]);
        let wide = |name: &str| self.rows(name, &[b, c.n]);
        let mean = |v: Var<'g>| v.mean_axis(0).reshape(&[c.n]);
        let kept = (c.decay > 0.0).then(|| r.feed("share", &[1], DType::F32) * -c.decay as f32 + 1.0);
        let rate = r.feed("rate", &[1], DType::F32) * (1.0 / c.nudge_beta) as f32;

        // The metric: what the nudge makes longer becomes cheaper, coordinate by coordinate.
        let metric = g.metric - engine::mutant!("lior-learns-the-other-way", rate, -rate) * mean(wide("nudged.slope") - wide("free.slope"));
        let bounded = |v: Var<'g>| v.max(r.full(&[c.n], 0.01)).min(r.full(&[c.n], 100.0));
        let mut metric = bounded(metric);
        if kept.is_some() || c.gauge {
            let mut log = metric.ln();
            log = kept.map_or(log, |kept| log * kept);
            log = if c.gauge { log - log.mean() } else { log };
            metric = bounded(log.exp());
        }
        r.update(g.metric, metric);

        // The rotor: each plane is rotated by its mean angle times its size, against the sign of the difference.
        let delta = (rows("nudged.lior") - rows("free.lior")).mean();
        let v = mean(wide("nudged.velocity"));
        let axis = |next: usize| -> Vec<usize> {
            let planes = (0..c.rotor_layers).flat_map(|l| (0..c.n / 2).map(move |j| (j, l)));
            planes.map(|(j, l)| (2 * j + l + next) % c.n).collect()
        };
        let (a, b_) = (self.chosen(v, &axis(0)), self.chosen(v, &axis(1)));
        let angle = pointwise(&[b_, a], |e, x| e.bin(Bin::Atan2, x[0], x[1]));
        let turn = -rate * c.rotor_rate as f32 * delta * angle * (a.square() + b_.square()).sqrt();
        let rotated = kept.map_or(g.rotor, |kept| g.rotor * kept) + turn;
        // Back into [-pi, pi): what is there already stays as it is, to the last bit.
        let around = pointwise(&[rotated], |e, x| {
            let (pi, twice) = (e.c(PI), e.c(2.0 * PI));
            let from = e.add(x[0], pi);
            let rounds = e.div(from, twice);
            let rounds = e.un(Un::Floor, rounds);
            let back = e.mul(rounds, twice);
            e.sub(x[0], back)
        });
        r.update(g.rotor, around);
        if c.nudge_every > 1 {
            r.update(self.last_delta(), delta);
        }
        [delta, metric, around]
    }

    /// The memory's next slots, the field and the counters. Answers with `report`.
    fn remember(&self, g: &Geometry<'g>, [delta, metric, rotor]: [Var<'g>; 3]) {
        let (c, r, b) = (self.c, self.r, self.batch);
        let rows = |name: &str| self.rows(name, &[b]);
        let wide = |name: &str| self.rows(name, &[b, c.n]);
        r.update(g.coordinates, ring_write(g.coordinates, g.filled, wide("free.coordinate")));
        r.update(g.states, ring_write(g.states, g.filled, self.rows("free.state", &[b, c.dim])));
        if c.probe {
            let next = r.state("memory_next", &[c.memory, 1], DType::F32, Init::Full(0.0));
            r.update(next, ring_write(next, g.filled, self.rows("free.next", &[b, 1])));
        }
        r.update(g.filled, count(g.filled, engine::mutant!("lior-counts-one-slot", b * self.accumulate, 1)));
        r.update(g.windows, count(g.windows, 1));
        r.update(g.re, self.between("free.re", &c.field));
        r.update(g.im, self.between("free.im", &c.field));

        let lior = rows("free.lior").mean();
        let in_row = r.state(BROKEN, &[1], DType::F32, Init::Full(0.0));
        let broken = -(lior.is_finite() * delta.is_finite()) + 1.0;
        let in_row_next = (in_row + 1.0) * broken;
        r.update(in_row, in_row_next);
        let curvature = self.between("free.curvature", &[1]);
        r.output("report", concat(&[lior, curvature, rows("free.speed").mean(), delta, metric, rotor, in_row_next], 0));
    }
}
