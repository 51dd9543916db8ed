//! Top-p (nucleus) sampling: tokens are drawn from the fewest tokens whose total probability reaches top_p.
//!
//! Probabilities are integer weights here, floor(2^40 exp((x - largest) / temperature)): their sums are exact in any order, so a GPU can use
//! atomics and still draw the same token as the CPU. Of equal weights, the earlier token counts as the larger. Tokens below 2^-40 of the largest,
//! and NaNs, are never drawn.
//!
//! The GPU does not sort the vocabulary: a histogram of the weights (32 bins to a factor of two) shows in which bin the nucleus ends, and only that
//! bin's tokens are resolved further, by radix selection on ten bits of (weight, token) at a time.

use crate::cpu::math::exp;
use crate::cpu::{View, ViewMut, simd};
use crate::kernel::{At, Code, Io, Launch, Place, Step};
use crate::meta::{DType, Meta};
use crate::op::{Case, Cost, Fill, Grads, In, Narrow, Op, Port, no_gradient};
use crate::ops::reduce::packs::{PACKS, pack};
use crate::philox::random_words;
use crate::record::Var;
use rayon::prelude::*;

/// How tokens are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Nucleus {
    /// 0 takes the largest logit, of equal ones the first.
    pub temperature: f32,
    /// In (0, 1]; 1 keeps every token.
    pub top_p: f32,
}

/// The weight of probability 1 relative to the largest.
const ONE: f32 = (1u64 << 40) as f32;

/// The nucleus: tokens that rank at `last` or above. `mass` is the sum of their weights.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Kept {
    last: u64,
    mass: u64,
}

/// Rank: larger weights first, of equal ones the earlier token.
fn place(weight: f32, token: usize) -> u64 {
    (weight.to_bits() as u64) << 32 | !(token as u32) as u64
}

fn mass(weight: f32) -> u64 {
    (weight * ONE) as u64
}

/// The largest number, ignoring NaNs.
fn largest(logits: &[f32]) -> f32 {
    logits.iter().copied().fold(f32::NEG_INFINITY, f32::max)
}

impl Nucleus {
    fn check(&self, x: &Meta) {
        let fits = x.rank() == 2 && x.dtype.is_float() && x.dim(0) <= 1 << INDEX_BITS;
        assert!(fits && self.temperature >= 0.0 && self.temperature.is_finite() && self.top_p > 0.0, "{self:?} of {x:?}");
    }

    fn inverse(&self) -> f32 {
        if self.temperature > 0.0 { 1.0 / crate::mutant!("temperature-ignored", self.temperature, 1.0) } else { 0.0 }
    }

    /// In units of 2^-32.
    fn share(&self) -> u64 {
        (self.top_p.min(1.0) as f64 * (1u64 << 32) as f64).round() as u64
    }

    /// In [2^-40, 1], or 0.
    fn weights(&self, logits: &[f32]) -> Vec<f32> {
        let (most, inverse, greedy) = (largest(logits), self.inverse(), self.temperature == 0.0);
        let mut weights = vec![0.0; logits.len()];
        simd(
            #[inline(always)]
            || {
                for (w, &x) in weights.iter_mut().zip(logits) {
                    let v = if greedy { 0.0 } else { exp((x - most) * inverse) };
                    let v = if x == most { 1.0 } else { v };
                    *w = if v >= 1.0 / ONE { v } else { 0.0 };
                }
            },
        );
        weights
    }

    /// None if no token can be drawn.
    fn kept(&self, weights: &[f32]) -> Option<Kept> {
        let mut places: Vec<u64> = weights.iter().enumerate().filter(|(_, w)| **w > 0.0).map(|(i, &w)| place(w, i)).collect();
        places.sort_unstable_by(|a, b| b.cmp(a));
        let total: u64 = weights.iter().map(|&w| mass(w)).sum();
        let limit = match self.temperature == 0.0 {
            true => 1,
            false => (self.share() as u128 * total as u128).div_ceil(1 << 32) as u64,
        };
        let mut sum = 0;
        places.into_iter().find_map(|last| {
            sum += mass(f32::from_bits((last >> 32) as u32));
            let reached = crate::mutant!("top-p-keeps-one-more", sum, sum - mass(f32::from_bits((last >> 32) as u32)));
            (reached >= limit).then_some(Kept { last, mass: sum })
        })
    }

    /// The launches that both ops share, then `finish` with its further arguments.
    fn code(&self, io: &Io, log_prob: bool, finish: impl Fn(&Places) -> Vec<Launch>) -> Code {
        let (rows, vocab) = (io.x[0].dim(1), io.x[0].dim(0));
        let chunks = vocab.div_ceil(CHUNK);
        let mut at = 0;
        let mut take = |bytes: usize| {
            let place = At::Work.plus(at);
            at += bytes.next_multiple_of(256);
            place
        };
        let p = Places {
            most: take(4 * rows * chunks),
            masses: take(8 * rows * BINS),
            sure: take(8 * rows * chunks * (CHUNK / SEGMENT)),
            list: take(8 * rows * LIST),
            rows: take(ROW * rows),
        };
        let x = At::X(0).into();
        let pass = |entry, args: &[Place]| self.pass(io, log_prob, entry, args);
        let mut steps = vec![
            pass("top_p_most", &[x, p.most, p.masses, p.rows]),
            pass("top_p_masses", &[x, p.most, p.masses, p.rows]),
            pass("top_p_list", &[x, p.most, p.masses, p.sure, p.list, p.rows]),
        ];
        steps.extend(finish(&p));
        Code { steps: steps.into_iter().map(Step::Launch).collect(), workspace: at }
    }

    fn launch(&self, io: &Io, source: &[&str], entry: &'static str, log_prob: bool) -> Launch {
        let (rows, vocab) = (io.x[0].dim(1), io.x[0].dim(0));
        Launch::new(&source.concat(), entry)
            .define_type("T", io.x[0].dtype)
            .define("ROWS", rows)
            .define("VOCAB", vocab)
            .define("CHUNK", CHUNK)
            .define("SEGMENT", SEGMENT)
            .define("LIST", LIST)
            .define("LOW_BITS", LOW_BITS)
            .define("INDEX_BITS", vocab.next_power_of_two().trailing_zeros())
            .define("TOP_P", format!("{}ull", self.share()))
            .define("GREEDY", (self.temperature == 0.0) as u8)
            .define_f32("INVERSE", self.inverse())
            .define("LOG_PROB", log_prob as u8)
    }

    /// A pass over all logits.
    fn pass(&self, io: &Io, log_prob: bool, entry: &'static str, args: &[Place]) -> Launch {
        const THREADS: usize = CHUNK / SEGMENT * 32;
        let (rows, vocab) = (io.x[0].dim(1), io.x[0].dim(0));
        self.launch(io, &[PACKS, WEIGHTS, include_str!("passes.cu")], entry, log_prob)
            .define("VEC", pack(&[io.x[0].dtype], &[vocab, io.offsets[0]]))
            .define("THREADS", THREADS)
            .grid(rows * vocab.div_ceil(CHUNK), 1, 1)
            .block(THREADS)
            .args(args)
    }

    fn finish(&self, io: &Io, log_prob: bool) -> Launch {
        let rows = io.x[0].dim(1);
        self.launch(io, &[WEIGHTS, include_str!("finish.cu")], "top_p_finish", log_prob).grid(rows, 1, 1).block(1024)
    }
}

const WEIGHTS: &str = include_str!("weights.cuh");
/// Logits of a block.
const CHUNK: usize = 8192;
/// Logits of a warp.
const SEGMENT: usize = 512;
/// Bits of a weight below those that select its bin.
const LOW_BITS: usize = 18;
const BINS: usize = (40 << (23 - LOW_BITS)) + 1;
/// The largest vocabulary: with 2^22 tokens, sums of weights have 62 bits.
const INDEX_BITS: usize = 22;
/// The most tokens of the bin in which the nucleus ends that are listed; if it has more, the row is read again. A bin holds 1,900 of 151,936 tokens
/// if logits are normal with a standard deviation of 0.6.
const LIST: usize = 4096;
/// Bytes of a `Row` of weights.cuh.
const ROW: usize = 48;

/// Parts of the workspace: the largest logit of each chunk; the mass of each bin; the mass of each segment's tokens above the last bin; the last bin's
/// tokens; the rows' state.
struct Places {
    most: Place,
    masses: Place,
    sure: Place,
    list: Place,
    rows: Place,
}

/// Draws a token for each row. Inputs: logits [rows, vocab]; rng, the feed of that name; perhaps turn, i32 `[1]`, the number of this draw if one `rng` is
/// used for many. Outputs: tokens i32 `[rows]`; with `log_prob`, log_softmax(logits) of each, f32 `[rows]`, at temperature 1 and over all tokens.
#[derive(Debug)]
pub struct Sample {
    /// Temperature and top-p.
    pub nucleus: Nucleus,
    /// Whether the token's log probability is a second output.
    pub log_prob: bool,
    /// The op's number in the model (see [`Recorder::new_site`](crate::Recorder::new_site)).
    pub site: u32,
}

impl Op for Sample {
    fn name(&self) -> &'static str {
        "sample"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        self.nucleus.check(&x[0]);
        let numbers = x[1] == Meta::new(&[4], DType::I32) && x.get(2).is_none_or(|turn| *turn == Meta::new(&[1], DType::I32));
        assert!(numbers, "sample of {x:?}");
        let mut y = vec![Meta::new(&[x[0].dim(1)], DType::I32)];
        y.extend(self.log_prob.then(|| Meta::f32(&[x[0].dim(1)])));
        y
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let (rows, vocab, logits, rng) = (x[0].dim(1), x[0].dim(0), x[0].f32(), x[1].i32());
        let turn = x.get(2).map_or(0, |t| t.i32()[0] as u32 as u64);
        let draw = |row: usize| {
            let logits = &logits[row * vocab..][..vocab];
            let weights = self.nucleus.weights(logits);
            let Some(kept) = self.nucleus.kept(&weights) else { return (0, f32::NAN) };
            let words = random_words(rng, self.site, turn * rows as u64 + row as u64);
            let number = (words[0] as u64) << 32 | words[1] as u64;
            let mut left = ((number as u128 * kept.mass as u128) >> 64) as u64;
            // The kept tokens divide [0, mass) in the order of their ids.
            let token = weights.iter().enumerate().position(|(i, &w)| {
                let own = if w > 0.0 && place(w, i) >= kept.last { mass(w) } else { 0 };
                let hit = left < own;
                left = left.saturating_sub(own);
                hit
            });
            let token = token.expect("a number below the mass of all");
            if !self.log_prob {
                return (token as i32, 0.0);
            }
            let temperature = crate::mutant!("log-prob-at-the-drawing-temperature", 1.0, self.nucleus.temperature);
            let all: u64 = Nucleus { temperature, top_p: 1.0 }.weights(logits).iter().map(|&w| mass(w)).sum();
            (token as i32, logits[token] - largest(logits) - (all as f32 / ONE).ln())
        };
        let drawn: Vec<(i32, f32)> = (0..rows).into_par_iter().map(draw).collect();
        y[0].i32().iter_mut().zip(&drawn).for_each(|(y, d)| *y = d.0);
        if self.log_prob {
            y[1].f32().iter_mut().zip(&drawn).for_each(|(y, d)| *y = d.1);
        }
    }

    fn precision(&self, _: Port, _: &[Meta]) -> Narrow {
        Narrow::Keep
    }

    fn cuda(&self, io: &Io) -> Code {
        self.nucleus.code(io, self.log_prob, |p| {
            let given = (0..io.x.len()).map(|i| At::X(i).into());
            let results = (0..io.y.len()).map(|i| At::Y(i).into());
            let args: Vec<Place> = given.chain([p.most, p.sure, p.list, p.rows]).chain(results).collect();
            let launch = self.nucleus.finish(io, self.log_prob);
            vec![launch.define("DRAW", 1).define("TURN", (io.x.len() > 2) as u8).define("SITE", format!("{}u", self.site)).args(&args)]
        })
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost { memory_bound: false, ..Cost::memory(x[0].bytes()) }
    }
}

/// The probabilities that `Sample` draws with: f32 [rows, vocab], 0 outside of the nucleus.
#[derive(Debug)]
pub struct TopP {
    /// Temperature and top-p.
    pub nucleus: Nucleus,
}

impl Op for TopP {
    fn name(&self) -> &'static str {
        "top_p"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        self.nucleus.check(&x[0]);
        vec![Meta::f32(&x[0].shape)]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let vocab = x[0].dim(0);
        y[0].f32().par_chunks_mut(vocab).zip(x[0].f32().par_chunks(vocab)).for_each(|(y, logits)| {
            let weights = self.nucleus.weights(logits);
            let kept = self.nucleus.kept(&weights);
            for (i, (y, &w)) in y.iter_mut().zip(&weights).enumerate() {
                *y = match kept {
                    Some(kept) if w > 0.0 && place(w, i) >= kept.last => mass(w) as f32 / kept.mass as f32,
                    _ => 0.0,
                };
            }
        });
    }

    fn precision(&self, _: Port, _: &[Meta]) -> Narrow {
        Narrow::Keep
    }

    fn cuda(&self, io: &Io) -> Code {
        self.nucleus.code(io, false, |p| {
            let x = At::X(0).into();
            let last = self.nucleus.finish(io, false).define("DRAW", 0).define("TURN", 0).args(&[x, p.most, p.sure, p.list, p.rows]);
            vec![last, self.nucleus.pass(io, false, "top_p_probabilities", &[x, p.most, p.rows, At::Y(0).into()])]
        })
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost { memory_bound: false, ..Cost::memory(x[0].bytes() + 4 * x[0].elements()) }
    }
}

impl<'g> Var<'g> {
    /// A token for each row of these logits: i32 `[rows]`. See `Sample`.
    #[track_caller]
    pub fn sample(self, nucleus: Nucleus, rng: Var<'g>, turn: Option<Var<'g>>) -> Var<'g> {
        self.drawn(nucleus, rng, turn, false)[0]
    }

    /// The same, with the log probability of each token, f32 `[rows]`.
    #[track_caller]
    pub fn sample_with_log_prob(self, nucleus: Nucleus, rng: Var<'g>, turn: Option<Var<'g>>) -> (Var<'g>, Var<'g>) {
        let y = self.drawn(nucleus, rng, turn, true);
        (y[0], y[1])
    }

    #[track_caller]
    fn drawn(self, nucleus: Nucleus, rng: Var<'g>, turn: Option<Var<'g>>, log_prob: bool) -> Vec<Var<'g>> {
        let inputs: Vec<Var> = [self, rng].into_iter().chain(turn).collect();
        self.recorder().op(Sample { nucleus, log_prob, site: self.recorder().new_site() }, &inputs)
    }

    /// The probabilities that tokens are drawn with: f32 [rows, vocab].
    #[track_caller]
    pub fn top_p(self, nucleus: Nucleus) -> Var<'g> {
        self.recorder().op1(TopP { nucleus }, &[self])
    }
}

/// For the cases: logits from whole numbers, so that the same tokens are drawn in every type.
fn logits<'g>(x: &[Var<'g>], apart: f32, dtype: DType) -> Var<'g> {
    (x[0].cast(DType::F32) * apart).cast(dtype)
}

fn drawn<'g>(logits: Var<'g>, x: &[Var<'g>], temperature: f32, top_p: f32) -> Vec<Var<'g>> {
    let (token, log_prob) = logits.sample_with_log_prob(Nucleus { temperature, top_p }, x[1], x.get(2).copied());
    vec![token.cast(DType::F32), log_prob]
}

fn filtered<'g>(logits: Var<'g>, temperature: f32, top_p: f32) -> Vec<Var<'g>> {
    vec![logits.top_p(Nucleus { temperature, top_p })]
}

macro_rules! rows {
    ($rows:literal, $vocab:literal, $values:literal) => {
        &[In(&[$rows, $vocab], Fill::Index($values)), In(&[4], Fill::Rng)]
    };
    ($rows:literal, $vocab:literal, $values:literal, $turns:literal) => {
        &[In(&[$rows, $vocab], Fill::Index($values)), In(&[4], Fill::Rng), In(&[1], Fill::Index($turns))]
    };
}

use DType::{BF16, F16, F32};

/// Cases that check and time the ops of this module.
pub const CASES: &[Case] = &[
    Case::new("many ties", rows!(9, 96, 128), |x| drawn(logits(x, 0.0625, BF16), x, 0.9, 0.9)),
    Case::new("three chunks", rows!(3, 20000, 100_000), |x| drawn(logits(x, 1e-4, F32), x, 0.7, 0.95)),
    Case::new("a later turn, at odd places", rows!(4, 9001, 1000, 5000), |x| drawn(logits(x, 0.02, F16), x, 1.3, 0.8)),
    Case::new("every token", rows!(3, 8200, 2000), |x| drawn(logits(x, 0.01, BF16), x, 1.0, 1.0)),
    Case::new("the most likely", rows!(5, 9000, 40), |x| drawn(logits(x, 0.5, F32), x, 0.0, 0.5)),
    Case::new("all the same", rows!(4, 9000, 1), |x| drawn(logits(x, 1.0, BF16), x, 0.9, 0.7)),
    Case::new("one token", rows!(3, 1, 9), |x| drawn(logits(x, 1.0, F32), x, 0.9, 0.9)),
    Case::new("probabilities", rows!(6, 96, 100_000), |x| filtered(logits(x, 1e-4, F32), 0.9, 0.9)),
    Case::new("probabilities, ties", rows!(3, 17_003, 200), |x| filtered(logits(x, 0.03125, BF16), 0.8, 0.6)),
    Case::new("probabilities, all the same", rows!(2, 9001, 1), |x| filtered(logits(x, 1.0, F16), 1.0, 0.5)),
    Case::new("probabilities, the most likely", rows!(2, 9001, 7), |x| filtered(logits(x, 1.0, F16), 0.0, 0.5)),
    Case::new("a part of the logits", rows!(4, 8200, 2000), |x| {
        let all = logits(x, 0.01, BF16).reshape(&[4 * 8200]);
        drawn(all.slice(0, 3, 3 + 4 * 8000).reshape(&[4, 8000]), x, 0.9, 0.9)
    }),
    Case::new("Qwen3, 12 rows", rows!(12, 151_936, 64), |x| vec![draw_one(logits(x, 0.0625, BF16), x).cast(F32)]).bench(),
    Case::new("Qwen3, 1024 rows", rows!(1024, 151_936, 64), |x| vec![draw_one(logits(x, 0.0625, BF16), x).cast(F32)]).bench(),
];

fn draw_one<'g>(logits: Var<'g>, x: &[Var<'g>]) -> Var<'g> {
    logits.sample(Nucleus { temperature: 0.9, top_p: 0.9 }, x[1], None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{Data, DataMut};
    use crate::philox::fill_normal;

    fn view(x: &[f32], shape: &'static [usize; 2]) -> View<'static> {
        let data: &'static [f32] = x.to_vec().leak();
        View { shape, strides: vec![shape[1], 1].leak(), data: Data::F32(data) }
    }

    fn normals(count: usize, deviation: f32) -> Vec<f32> {
        let mut x = vec![0.0; count];
        fill_normal(3, count as u64, &mut x);
        x.iter_mut().for_each(|v| *v *= deviation);
        x
    }

    fn tokens(nucleus: Nucleus, logits: View, turn: i32) -> Vec<i32> {
        let rng = View { shape: &[4], strides: &[1], data: Data::I32(&[5, 6, 7, 0]) };
        let turn = [turn];
        let turn = View { shape: &[1], strides: &[1], data: Data::I32(&turn) };
        let mut y = vec![0; logits.shape[0]];
        let shape = [y.len()];
        let out = ViewMut { shape: &shape, data: DataMut::I32(&mut y) };
        Sample { nucleus, log_prob: false, site: 1 }.cpu(&[logits, rng, turn], &mut [out], &mut []);
        y
    }

    fn probabilities(nucleus: Nucleus, logits: View) -> Vec<f32> {
        let mut y = vec![0.0; logits.shape[0] * logits.shape[1]];
        TopP { nucleus }.cpu(&[logits], &mut [ViewMut { shape: logits.shape, data: DataMut::F32(&mut y) }], &mut []);
        y
    }

    /// The textbook algorithm: sort, cumulative sum, cut and renormalize, in f64.
    fn plain(logits: &[f32], temperature: f64, top_p: f64) -> Vec<f64> {
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
        let mut p: Vec<f64> = logits.iter().map(|&x| ((x as f64 - most) / temperature).exp()).collect();
        let total: f64 = p.iter().sum();
        p.iter_mut().for_each(|v| *v /= total);
        let mut order: Vec<usize> = (0..p.len()).collect();
        order.sort_by(|&a, &b| p[b].total_cmp(&p[a])); // stable
        let (mut before, mut kept) = (0.0, vec![0.0; p.len()]);
        for i in order.into_iter().take_while(|&i| {
            let inside = before < top_p;
            before += p[i];
            inside
        }) {
            kept[i] = p[i];
        }
        let mass: f64 = kept.iter().sum();
        kept.iter().map(|v| v / mass).collect()
    }

    #[test]
    fn the_nucleus_is_the_references() {
        for (count, deviation, temperature, top_p) in
            [(50, 2.0, 0.9, 0.9), (3000, 0.5, 0.7, 0.95), (3000, 4.0, 1.5, 0.3), (700, 1.0, 1.0, 1.0)]
        {
            let logits = normals(count, deviation);
            let shape: &'static [usize; 2] = Box::leak(Box::new([1, count]));
            let ours = probabilities(Nucleus { temperature, top_p }, view(&logits, shape));
            for (a, b) in ours.iter().zip(plain(&logits, temperature as f64, top_p as f64)) {
                assert!((*a as f64 - b).abs() < 1e-6 && (*a > 0.0) == (b > 0.0), "{a} for {b}");
            }
        }
    }

    #[test]
    fn of_equal_tokens_the_earlier_are_kept() {
        let logits = view(&[1.0, 3.0, 3.0, 3.0, 3.0, -1.0], &[1, 6]);
        let p = probabilities(Nucleus { temperature: 1.0, top_p: 0.5 }, logits);
        assert_eq!(p, [0.0, 1.0 / 3.0, 1.0 / 3.0, 1.0 / 3.0, 0.0, 0.0]);
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let (rows, turns) = (500, 40);
        let one = normals(20, 1.0);
        let all: Vec<f32> = std::iter::repeat_n(&one, rows).flatten().copied().collect();
        let nucleus = Nucleus { temperature: 0.9, top_p: 0.9 };
        let p = probabilities(nucleus, view(&one, &[1, 20]));
        let mut counts = [0.0; 20];
        for turn in 0..turns {
            tokens(nucleus, view(&all, &[500, 20]), turn).iter().for_each(|&t| counts[t as usize] += 1.0);
        }
        let n = (rows * turns as usize) as f32;
        for (count, p) in counts.iter().zip(p) {
            let deviation = (n * p * (1.0 - p)).sqrt();
            assert!((count - n * p).abs() <= 4.5 * deviation, "{count} draws, {} expected", n * p);
        }
    }

    /// The log probability is the model's own, whatever it was drawn with.
    #[test]
    fn log_probabilities_are_of_all_tokens_at_temperature_1() {
        const VOCAB: usize = 300;
        let logits = normals(8 * VOCAB, 2.0);
        for (temperature, top_p) in [(0.7, 0.9), (1.6, 0.5), (1.0, 1.0), (0.0, 1.0)] {
            let (mut tokens, mut found) = ([0; 8], [0.0; 8]);
            let rng = View { shape: &[4], strides: &[1], data: Data::I32(&[5, 6, 7, 0]) };
            let outs = [DataMut::I32(&mut tokens), DataMut::F32(&mut found)].map(|data| ViewMut { shape: &[8], data });
            let op = Sample { nucleus: Nucleus { temperature, top_p }, log_prob: true, site: 1 };
            op.cpu(&[view(&logits, &[8, VOCAB]), rng], &mut { outs }, &mut []);
            for ((row, &token), found) in logits.chunks(VOCAB).zip(&tokens).zip(found) {
                let log_sum = row.iter().map(|&x| (x as f64).exp()).sum::<f64>().ln();
                let expected = row[token as usize] as f64 - log_sum;
                assert!(expected < -0.01 && (found as f64 - expected).abs() < 1e-4, "at {temperature}: {found} for {expected}");
            }
        }
    }

    #[test]
    fn edges() {
        let nan = f32::NAN;
        let logits = view(&[2.0, nan, 7.0, 7.0, nan, nan, nan, nan, f32::INFINITY, 0.0, 0.0, 0.0], &[3, 4]);
        assert_eq!(tokens(Nucleus { temperature: 0.0, top_p: 1.0 }, logits, 0), [2, 0, 0]);
        assert_eq!(tokens(Nucleus { temperature: 0.01, top_p: 1e-3 }, logits, 3), [2, 0, 0]);
    }
}
