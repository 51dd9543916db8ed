//! The store of states, by name: parameters, optimizer states, KV caches, counters.

use crate::cpu::Buffer;
use crate::cuda::{self, Cuda};
use crate::error::Error;
use crate::graph::{Graph, Init, Role};
use crate::meta::Meta;
use crate::philox::{fill_normal, hash_name, philox, uniform};
use crate::ranks::{Part, cut, whole};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// A state's value.
pub struct Tensor {
    /// Shape and type.
    pub meta: Meta,
    /// What it is to the model: checkpoints hold parameters and carried states, not frozen weights.
    pub role: Role,
    /// If this rank has a part of it only: which.
    pub parts: Vec<Part>,
    memory: Memory,
}

/// Where a state's numbers are.
enum Memory {
    Host(Buffer),
    Gpu(Cuda, cuda::Memory),
}

impl Tensor {
    /// Shape and type of the whole of which a rank may have a part.
    pub fn whole(&self) -> Meta {
        whole(&self.parts, &self.meta)
    }

    /// The raw bytes; from a GPU they are copied.
    pub fn bytes(&self) -> Result<Cow<'_, [u8]>, Error> {
        match &self.memory {
            Memory::Host(b) => Ok(b.bytes().into()),
            Memory::Gpu(cuda, d) => Ok(cuda.download(d, 0, self.meta.bytes())?.into()),
        }
    }

    /// The numbers, converted to f32.
    pub fn f32(&self) -> Result<Vec<f32>, Error> {
        Ok(crate::cpu::widened(&self.bytes()?, self.meta.dtype))
    }
}

/// All states of a run. Programs of one run share it.
pub struct Store {
    seed: u64,
    tensors: BTreeMap<String, Tensor>,
}

impl Store {
    /// An empty store; `seed` determines the initial values of random states.
    pub fn new(seed: u64) -> Store {
        Store { seed, tensors: BTreeMap::new() }
    }

    /// Creates those states of a graph that the store does not have yet, with their initial values, on the GPU if one is given; those named in `offloaded` in
    /// host memory that the GPU reaches.
    pub fn ensure(&mut self, g: &Graph, gpu: Option<&Cuda>, offloaded: &[&str]) -> Result<(), Error> {
        let new = |name: &str| !self.tensors.contains_key(name) && !offloaded.contains(&name);
        let bytes = g.states().filter(|(s, _)| new(&s.name)).map(|(_, meta)| cuda::Memory::padded(meta.bytes())).sum();
        // One allocation for all: the driver would give each whole pages of 2 MiB.
        let mut rest = gpu.filter(|_| bytes > 0).map(|cuda| cuda.allocate(bytes)).transpose()?;
        for (state, meta) in g.states() {
            let parts = g.parts.states.get(&state.name).cloned().unwrap_or_default();
            match self.tensors.get(&state.name) {
                Some(t) if t.meta == *meta => {}
                Some(t) => return Err(Error::StateShape { name: state.name.clone(), have: t.meta.clone(), want: meta.clone() }),
                None => {
                    let memory = match gpu {
                        None => Memory::Host(initial(state.init, self.seed, &state.name, meta, &parts)?),
                        Some(cuda) => {
                            let d = match &mut rest {
                                Some(rest) if !offloaded.contains(&&*state.name) => rest.split_off(meta.bytes()),
                                _ => cuda.allocate_on_host(meta.bytes())?,
                            };
                            match state.init {
                                Init::Full(0.0) => cuda.fill(&d, 0)?,
                                init => cuda.upload(&d, initial(init, self.seed, &state.name, meta, &parts)?.bytes())?,
                            }
                            Memory::Gpu(cuda.clone(), d)
                        }
                    };
                    self.tensors.insert(state.name.clone(), Tensor { meta: meta.clone(), role: state.role, parts, memory });
                }
            }
        }
        Ok(())
    }

    /// A state by name.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)
    }

    /// A state's host memory, if it has the shape and type that a program was compiled for.
    pub(crate) fn host(&mut self, name: &str, want: &Meta) -> Result<&mut Buffer, Error> {
        self.expect(name, want)?;
        match self.tensors.get_mut(name).map(|t| &mut t.memory) {
            Some(Memory::Host(b)) => Ok(b),
            _ => Err(Error::NoState(name.into())),
        }
    }

    /// The same for GPU memory.
    pub(crate) fn device(&self, name: &str, want: &Meta) -> Result<&cuda::Memory, Error> {
        self.expect(name, want)?;
        match self.tensors.get(name).map(|t| &t.memory) {
            Some(Memory::Gpu(_, d)) => Ok(d),
            _ => Err(Error::NoState(name.into())),
        }
    }

    fn expect(&self, name: &str, want: &Meta) -> Result<(), Error> {
        match self.tensors.get(name) {
            Some(t) if t.meta == *want => Ok(()),
            Some(t) => Err(Error::StateShape { name: name.into(), have: t.meta.clone(), want: want.clone() }),
            None => Err(Error::NoState(name.into())),
        }
    }

    /// All states, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.tensors.iter().map(|(n, t)| (n.as_str(), t))
    }

    /// Replaces a state's value by one of the same shape and type. Of a whole, a rank takes its part.
    pub fn set(&mut self, name: &str, meta: &Meta, bytes: &[u8]) -> Result<(), Error> {
        let t = self.tensors.get_mut(name).ok_or_else(|| Error::NoState(name.into()))?;
        if t.meta != *meta && *meta == t.whole() && bytes.len() == meta.bytes() {
            let (own, bytes) = (t.meta.clone(), cut(&t.parts, bytes.to_vec()));
            return self.set(name, &own, &bytes);
        }
        if t.meta != *meta || bytes.len() != meta.bytes() {
            return Err(Error::StateShape { name: name.into(), have: t.meta.clone(), want: meta.clone() });
        }
        match &mut t.memory {
            Memory::Host(b) => b.bytes_mut().copy_from_slice(bytes),
            Memory::Gpu(cuda, d) => cuda.upload(d, bytes)?,
        }
        Ok(())
    }

    /// Replaces a state's value by numbers of any float type, rounded if the state's own type is narrower.
    pub fn set_floats(&mut self, name: &str, from: &Meta, bytes: &[u8]) -> Result<(), Error> {
        let t = self.tensors.get(name).ok_or_else(|| Error::NoState(name.into()))?;
        let own = t.whole();
        if own.dtype == from.dtype
            || !own.dtype.is_float()
            || !from.dtype.is_float()
            || bytes.len() != from.bytes()
            || own.shape != from.shape
        {
            return self.set(name, from, bytes);
        }
        self.set(name, &own, crate::cpu::converted(bytes, from.dtype, own.dtype).bytes())
    }

    /// Removes all states whose names start with `prefix`, so that `ensure` initializes them again.
    pub fn remove_prefix(&mut self, prefix: &str) {
        self.tensors.retain(|name, _| !name.starts_with(prefix));
    }

    /// The memory of all states together.
    pub fn bytes(&self) -> usize {
        self.tensors.values().map(|t| t.meta.bytes()).sum()
    }
}

/// The initial value of a state.
fn initial(init: Init, seed: u64, name: &str, meta: &Meta, parts: &[Part]) -> Result<Buffer, Error> {
    let lacks = || Error::NoMemory { what: format!("state '{name}' {meta:?}"), bytes: meta.bytes() };
    let mut data = Buffer::try_zeroed(meta.bytes()).ok_or_else(lacks)?;
    if init == Init::Full(0.0) {
        return Ok(data);
    }
    let stream = crate::mutant!("states-start-alike", hash_name(name), 0);
    let mut numbers: Vec<f32> = vec![];
    let all = whole(parts, meta).elements();
    numbers.try_reserve_exact(all).map_err(|_| lacks())?;
    numbers.resize(all, 0.0);
    match init {
        Init::Full(v) => numbers.fill(v),
        Init::Normal { std } => {
            fill_normal(seed, stream, &mut numbers);
            numbers.iter_mut().for_each(|v| *v *= std);
        }
        Init::Truncated { std } => {
            fill_normal(seed, stream, &mut numbers);
            for (i, v) in numbers.iter_mut().enumerate() {
                // Draw again, from this element's own counter, until it is inside.
                let mut round = 1;
                while v.abs() > 2.0 {
                    if crate::mutant!("truncated-is-cut-off", false, true) {
                        *v = v.clamp(-2.0, 2.0);
                        break;
                    }
                    let mut again = [0.0];
                    fill_normal(seed ^ (round << 32), stream.wrapping_add(i as u64), &mut again);
                    *v = again[0];
                    round += 1;
                }
                *v *= std;
            }
        }
        Init::Uniform { bound } => {
            fill_uniform(seed, stream, &mut numbers, |u| bound * crate::mutant!("uniform-on-one-side", 2.0 * u - 1.0, u))
        }
        Init::LogOfUniform { low, high } => fill_uniform(seed, stream, &mut numbers, |u| {
            let v = low + (high - low) * u;
            crate::mutant!("uniform-without-logarithm", v.ln(), v)
        }),
        Init::StepSize { low, high } => fill_uniform(seed, stream, &mut numbers, |u| {
            let step = low * (high / low).powf(u);
            crate::mutant!("step-size-without-softplus", step + (-(-step).exp_m1()).ln(), step.ln())
        }),
    }
    for part in parts {
        let own = part.cut(bytemuck::cast_slice(&numbers));
        numbers = own.chunks_exact(4).map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect();
    }
    crate::cpu::narrow(&numbers, meta.dtype, data.bytes_mut());
    Ok(data)
}

/// `of` numbers that are uniform in [0, 1).
fn fill_uniform(seed: u64, stream: u64, numbers: &mut [f32], of: impl Fn(f32) -> f32) {
    let key = [seed as u32, (seed >> 32) as u32];
    for (block, four) in numbers.chunks_mut(4).enumerate() {
        let words = philox([block as u32, 1, stream as u32, (stream >> 32) as u32], key);
        four.iter_mut().zip(words).for_each(|(v, w)| *v = of(uniform(w)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DRAWS: usize = 100_000;

    fn drawn(init: Init, name: &str, seed: u64) -> Vec<f64> {
        let buffer = initial(init, seed, name, &Meta::f32(&[DRAWS]), &[]).unwrap();
        let numbers: &[f32] = bytemuck::cast_slice(buffer.bytes());
        numbers.iter().map(|v| *v as f64).collect()
    }

    /// What follows a distribution has its range, its mean and its variance: `of` makes the numbers uniform, or leaves them.
    #[track_caller]
    fn follows(init: Init, of: impl Fn(f64) -> f64, [low, high]: [f64; 2], mean: f64, variance: f64) {
        let v: Vec<f64> = drawn(init, "w", 3).into_iter().map(of).collect();
        let n = v.len() as f64;
        let found = v.iter().sum::<f64>() / n;
        let spread = v.iter().map(|v| (v - found).powi(2)).sum::<f64>() / n;
        // Nearly all of the range is drawn from, and nothing beyond it.
        let (least, most) = v.iter().fold((f64::MAX, f64::MIN), |(a, b), &v| (a.min(v), b.max(v)));
        let edge = 0.01 * (high - low);
        assert!(
            v.len() == DRAWS && least >= low - 1e-6 && least <= low + edge && most <= high + 1e-6 && most >= high - edge,
            "{init:?}: {least} to {most}"
        );
        assert!((found - mean).abs() < 5.0 * (variance / n).sqrt(), "{init:?}: mean {found}, not {mean}");
        assert!((spread / variance - 1.0).abs() < 0.03, "{init:?}: variance {spread}, not {variance}");
    }

    #[test]
    fn initial_values_follow_their_distributions() {
        let same = |v: f64| v;
        // Of 100,000 normal numbers the largest has 4 to 5 deviations.
        let normal = drawn(Init::Normal { std: 0.5 }, "w", 3);
        let most = normal.iter().fold(0.0f64, |m, v| m.max(v.abs()));
        let variance = normal.iter().map(|v| v * v).sum::<f64>() / DRAWS as f64;
        assert!((2.0..3.0).contains(&most) && (variance / 0.25 - 1.0).abs() < 0.03, "{most} {variance}");
        assert!((normal.iter().sum::<f64>() / DRAWS as f64).abs() < 5.0 * 0.5 / (DRAWS as f64).sqrt());
        // 1 - 4 phi(2) / (2 Phi(2) - 1): what is cut off is drawn again. Cutting it off at the edge would give 0.92.
        follows(Init::Truncated { std: 0.5 }, same, [-1.0, 1.0], 0.0, 0.773_741 * 0.25);
        follows(Init::Uniform { bound: 0.3 }, same, [-0.3, 0.3], 0.0, 0.3 * 0.3 / 3.0);
        follows(Init::LogOfUniform { low: 1.0, high: 16.0 }, f64::exp, [1.0, 16.0], 8.5, 15.0 * 15.0 / 12.0);
        // softplus, and then the logarithm, which is uniform.
        let log_step = |v: f64| v.exp().ln_1p().ln();
        let (low, high) = (0.001f64.ln(), 0.1f64.ln());
        follows(Init::StepSize { low: 0.001, high: 0.1 }, log_step, [low, high], (low + high) / 2.0, (high - low).powi(2) / 12.0);
        assert!(drawn(Init::Full(2.5), "w", 3).iter().all(|v| *v == 2.5));
    }

    #[test]
    fn states_of_other_names_and_seeds_start_elsewhere() {
        let inits = [
            Init::Normal { std: 0.5 },
            Init::Truncated { std: 0.5 },
            Init::Uniform { bound: 0.3 },
            Init::LogOfUniform { low: 1.0, high: 16.0 },
            Init::StepSize { low: 0.001, high: 0.1 },
        ];
        for init in inits {
            let first = drawn(init, "blocks.0.w", 3);
            assert_eq!(first, drawn(init, "blocks.0.w", 3));
            for (name, seed) in [("blocks.1.w", 3), ("blocks.0.w", 4)] {
                let equal = first.iter().zip(&drawn(init, name, seed)).filter(|(a, b)| a == b).count();
                assert!(
                    equal < DRAWS / 100,
                    "{init:?}: {equal} of {DRAWS} numbers of {name} with seed {seed} are those of blocks.0.w with 3"
                );
            }
        }
    }
}
