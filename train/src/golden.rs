//! Golden files: a recipe's numbers as plain PyTorch computes them, and how ours are compared with them.

use crate::checkpoint::{CheckpointError, Loaded, load_safetensors};
use crate::config::TrainConfig;
use crate::recipe::{Computed, Session, TrainError};
use engine::{Data, Device, Meta, Recorder, Role, Switches, Var};
use std::path::Path;

pub struct Golden {
    pub recipe: String,
    pub config: serde_json::Value,
    pub optimizer: Optimizer,
    pub steps: u64,
    tensors: Loaded,
}

#[derive(Clone, Copy, Debug, serde::Deserialize)]
pub struct Optimizer {
    pub lr: f64,
    pub beta1: f32,
    pub beta2: f32,
    pub eps: f32,
    pub weight_decay: f32,
    pub clip: f32,
}

#[derive(Debug, thiserror::Error)]
pub enum GoldenError {
    #[error(transparent)]
    File(#[from] CheckpointError),
    #[error("{path} is not a golden file: {reason}")]
    Not { path: String, reason: String },
}

impl Golden {
    pub fn open(path: &Path) -> Result<Golden, GoldenError> {
        Golden::new(&path.display().to_string(), load_safetensors(path)?)
    }

    /// A file's bytes.
    pub fn read(name: &str, bytes: Vec<u8>) -> Result<Golden, GoldenError> {
        Golden::new(name, Loaded::parse(Path::new(name), bytes)?)
    }

    fn new(name: &str, tensors: Loaded) -> Result<Golden, GoldenError> {
        let not = |reason: String| GoldenError::Not { path: name.to_string(), reason };
        let meta = tensors.metadata();
        let field = |name: &str| meta.get(name).cloned().ok_or_else(|| not(format!("its metadata has no '{name}'")));
        let json = |name: &str| {
            let text = field(name)?;
            serde_json::from_str::<serde_json::Value>(&text).map_err(|e| not(format!("its '{name}': {e}")))
        };
        let optimizer = serde_json::from_value(json("optimizer")?).map_err(|e| not(format!("its 'optimizer': {e}")))?;
        let steps = field("steps")?.parse().map_err(|_| not("its 'steps' is no number".into()))?;
        Ok(Golden { recipe: field("recipe")?, config: json("config")?, optimizer, steps, tensors })
    }

    pub fn names(&self) -> Vec<String> {
        self.tensors.names()
    }

    pub fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.tensors.get(name).map(|t| t.1)
    }

    /// Any tensor, as f32.
    pub fn f32(&self, name: &str) -> Option<Vec<f32>> {
        let (dtype, _, bytes) = self.tensors.get(name)?;
        match dtype.as_str() {
            "F32" => Some(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()),
            "I64" => Some(self.i32(name)?.into_iter().map(|v| v as f32).collect()),
            "U8" => Some(bytes.iter().map(|&b| b as f32).collect()),
            _ => None,
        }
    }

    /// Whole numbers that fit into 32 bits.
    pub fn i32(&self, name: &str) -> Option<Vec<i32>> {
        let (dtype, _, bytes) = self.tensors.get(name)?;
        let read = |b: &[u8]| i32::try_from(i64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]])).ok();
        if dtype != "I64" {
            return None;
        }
        bytes.chunks_exact(8).map(read).collect()
    }
}

/// A recording of named values.
pub type Record<'a> = &'a dyn for<'g> Fn(&'g Recorder) -> Vec<(&'static str, Var<'g>)>;

/// Everything that the golden file of a differentiated recipe holds: `losses` (the first is differentiated, the others are metrics) and
/// `outputs`, over the file's steps with its optimizer. Parameters named in `frozen` are not trained.
pub fn differentiated(
    file: &Golden,
    switches: &Switches,
    device: &Device,
    losses: Record,
    outputs: Record,
    feeds: &[(&str, Data)],
    frozen: &[&str],
) -> Result<Computed, TrainError> {
    let bad = |m: String| TrainError::Other(format!("this golden file {m}"));
    let o = &file.optimizer;
    let train =
        TrainConfig { beta1: o.beta1, beta2: o.beta2, eps: o.eps, weight_decay: o.weight_decay, clip: o.clip, ..TrainConfig::default() };
    let mut s = Session::new(device, switches, 0);
    let r = Recorder::new();
    let values = losses(&r);
    let params: Vec<_> = r.params().into_iter().filter(|p| !frozen.contains(&p.0.as_str())).collect();
    let grads = r.grad(values[0].1, &params.iter().map(|p| p.1).collect::<Vec<_>>());
    let step = crate::optim::adamw(&r, &params, &grads, values[0].1, &train);
    params.iter().zip(&grads).for_each(|((name, _), g)| r.output(&format!("grad/{name}"), *g));
    values.iter().for_each(|(name, v)| r.output(name, *v));
    r.output("grad_norm", step.norm);
    let metrics: Vec<&'static str> = values[1..].iter().map(|v| v.0).chain(["grad_norm"]).collect();
    let (loss, names): (&str, Vec<String>) = (values[0].0, params.iter().map(|p| p.0.clone()).collect());
    s.load("train", r.finish())?;

    let r = Recorder::new();
    let answers: Vec<&'static str> = outputs(&r)
        .into_iter()
        .map(|(name, v)| {
            r.output(name, v);
            name
        })
        .collect();
    s.load("outputs", r.finish())?;

    let untrained = s.store.iter().filter(|(n, t)| t.role == Role::Frozen || frozen.contains(n));
    let untrained: Vec<String> = untrained.map(|(n, _)| n.to_string()).collect();
    for name in names.iter().chain(&untrained) {
        let want = s.store.get(name).expect("just loaded").meta.shape.clone();
        let numbers = file.f32(&format!("param/{name}")).ok_or_else(|| bad(format!("has no param/{name}")))?;
        let shape = file.shape(&format!("param/{name}")).unwrap_or_default();
        if shape != want {
            return Err(bad(format!("has param/{name} {shape:?}, but its config makes it {want:?}")));
        }
        s.store.set_floats(name, &Meta::f32(&shape), bytemuck::cast_slice(&numbers))?;
    }
    let rate = [o.lr as f32];
    let feeds = [feeds, &[("rate", Data::F32(&rate))]].concat();
    let mut out = Computed::new();
    s.run("outputs", &feeds)?;
    for name in answers {
        out.insert(format!("output/{name}"), s.read("outputs", name)?);
    }
    for i in 0..file.steps {
        s.run("train", &feeds)?;
        let mut push = |name: String, v: f64| out.entry(name).or_default().push(v as f32);
        push("loss".into(), s.scalar("train", loss)?);
        for name in &metrics {
            push(format!("metric/{name}"), s.scalar("train", name)?);
        }
        if i == 0 {
            for name in &names {
                out.insert(format!("grad/{name}"), s.read("train", &format!("grad/{name}"))?);
            }
        }
    }
    for name in &names {
        out.insert(format!("after/{name}"), s.store.get(name).expect("loaded").f32()?);
    }
    Ok(out)
}

/// What counts as the same.
#[derive(Clone, Copy, Debug)]
pub enum Rule {
    /// As golden.py says: norm(a - b) <= tolerance * norm(b) + 1e-6 * sqrt(elements); beside that, an error of half a percent never
    /// passes for rounding.
    Tolerance(f64),
    /// For narrow types: every tensor points in the same direction, to at least this cosine, and is as long to within 10%; a single number,
    /// often the small sum of large terms, to within half.
    Cosine(f64),
}

/// One tensor's comparison.
pub struct Compared {
    pub name: String,
    /// norm(ours - theirs) / norm(theirs)
    pub error: f64,
    pub cosine: f64,
    pub ok: bool,
}

/// Compares everything that the file holds and that can be computed. A tensor that was not computed fails.
pub fn compare(file: &Golden, computed: &Computed, rule: Rule) -> Vec<Compared> {
    let mut all = vec![];
    let inputs = ["param/", "input/"];
    for name in file.names().into_iter().filter(|n| !inputs.iter().any(|p| n.starts_with(p))) {
        let theirs = file.f32(&name).unwrap_or_default();
        let c = match computed.get(&name) {
            Some(ours) if ours.len() == theirs.len() => one(name, ours, &theirs, rule),
            _ => Compared { name, error: f64::INFINITY, cosine: f64::NAN, ok: false },
        };
        all.push(c);
    }
    all
}

fn one(name: String, ours: &[f32], theirs: &[f32], rule: Rule) -> Compared {
    let sum = |it: &mut dyn Iterator<Item = f64>| it.sum::<f64>();
    let pairs = || ours.iter().zip(theirs).map(|(&a, &b)| (a as f64, b as f64));
    let difference = sum(&mut pairs().map(|(a, b)| (a - b) * (a - b))).sqrt();
    let (length, size) = (sum(&mut pairs().map(|(a, _)| a * a)).sqrt(), sum(&mut pairs().map(|(_, b)| b * b)).sqrt());
    let cosine = sum(&mut pairs().map(|(a, b)| a * b)) / (length * size).max(1e-300);
    let root = (theirs.len() as f64).sqrt();
    // Each is written so that a NaN fails.
    let ok = match rule {
        Rule::Tolerance(tolerance) => {
            // The absolute term is for tensors of pure rounding noise; half a percent of anything larger is a mistake.
            let gross = difference > tolerance.max(5e-3) * size && size > 1e-6 * root;
            difference <= tolerance * size + 1e-6 * root && !gross
        }
        Rule::Cosine(least) => {
            (cosine >= least && (length / size - 1.0).abs() <= if theirs.len() > 1 { 0.1 } else { 0.5 })
                || (size <= 1e-6 * root && length <= 1e-6 * root)
        }
    };
    Compared { name, error: difference / size.max(1e-30), cosine, ok }
}
