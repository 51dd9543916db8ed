//! Golden files: a recipe's numbers as plain PyTorch computes them, and how ours are compared with them.

mod choices;
mod rule;

pub use rule::{Compared, Narrow, Rule, compare, compare_with};

use crate::checkpoint::{CheckpointError, Loaded, load_safetensors};
use crate::config::TrainConfig;
use crate::recipe::{Computed, Reference, Session, TrainError};
use choices::Choices;
use engine::graph::Graph;
use engine::passes::{Mode, Numerics, Target};
use engine::philox::philox;
use engine::{DType, Data, Device, Meta, Recorder, Role, Switches, Var};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

pub struct Golden {
    pub recipe: String,
    pub config: serde_json::Value,
    pub optimizer: Optimizer,
    pub steps: u64,
    tensors: Arc<Loaded>,
    /// Parameters are rounded at random, drawn from this.
    shaken: Option<u32>,
}

#[derive(Clone, Copy, Debug, serde::Deserialize)]
pub struct Optimizer {
    pub lr: f64,
    pub beta1: f32,
    pub beta2: f32,
    pub eps: f32,
    pub weight_decay: f32,
    pub clip: f32,
    #[serde(default = "Optimizer::adamw")]
    pub kind: crate::config::Optimizer,
    #[serde(default = "Optimizer::momentum")]
    pub momentum: f32,
}

impl Optimizer {
    fn adamw() -> crate::config::Optimizer {
        crate::config::Optimizer::AdamW
    }

    fn momentum() -> f32 {
        TrainConfig::default().momentum
    }
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
        Ok(Golden { recipe: field("recipe")?, config: json("config")?, optimizer, steps, tensors: Arc::new(tensors), shaken: None })
    }

    pub fn names(&self) -> Vec<String> {
        self.tensors.names()
    }

    pub fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.tensors.get(name).map(|t| t.1)
    }

    /// Everything that it holds.
    fn numbers(&self) -> Computed {
        self.names().into_iter().map(|n| (n.clone(), self.f32(&n).unwrap_or_default())).collect()
    }

    /// The same file with every parameter rounded, up or down at random, to one bit less of mantissa than bf16 has.
    fn shaken(&self, seed: Option<u32>) -> Golden {
        let (recipe, config) = (self.recipe.clone(), self.config.clone());
        Golden { recipe, config, optimizer: self.optimizer, steps: self.steps, tensors: self.tensors.clone(), shaken: seed }
    }

    /// Any tensor, as f32.
    pub fn f32(&self, name: &str) -> Option<Vec<f32>> {
        let (dtype, _, bytes) = self.tensors.get(name)?;
        match (dtype.as_str(), self.shaken) {
            ("F32", Some(seed)) if name.starts_with("param/") => {
                let word = xxh3_64(name.as_bytes()) as u32;
                let rounded = |(i, b): (usize, &[u8])| {
                    let bits = u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                    let drawn = philox([i as u32, word, 0, 0], [seed, 0])[0];
                    f32::from_bits(bits.wrapping_add(drawn % (1 << DROPPED)) & !((1 << DROPPED) - 1))
                };
                return Some(bytes.chunks_exact(4).enumerate().map(rounded).collect());
            }
            _ => {}
        }
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

/// Bits of an f32 that bf16 does not have, and one more.
const DROPPED: u32 = 17;
/// Runs on shaken parameters.
const SHAKEN: u32 = 3;

/// A recording of named values.
pub type Record<'a> = &'a dyn for<'g> Fn(&'g Recorder) -> Vec<(&'static str, Var<'g>)>;

/// Passes that are on and round f32 to narrower types.
fn rounding(switches: &Switches, target: Target) -> impl Iterator<Item = &'static str> + '_ {
    let rounds = move |p: &&'static dyn engine::passes::Switch| {
        p.numerics(target, DType::F32) == Numerics::LowPrecision && switches.mode(*p, target) != Mode::Off
    };
    engine::passes::all().filter(rounds).map(|p| p.name())
}

/// Whether numbers are rounded to narrower types, so that a golden file is compared by `Rule::Narrow`.
fn rounds(switches: &Switches, target: Target) -> bool {
    rounding(switches, target).next().is_some()
}

/// The same switches without passes that round.
fn wide(switches: &Switches, target: Target) -> Result<Switches, TrainError> {
    let mut wide = switches.clone();
    for pass in rounding(switches, target) {
        wide.set(pass, "off")?;
    }
    Ok(wide)
}

/// How a file is compared with what these switches compute: to a tolerance, or, where they round to narrower types, by how the model answers
/// to rounding. `least` is what a tensor may then be off by anyway.
pub fn rule(
    reference: &dyn Reference,
    file: &Golden,
    switches: &Switches,
    device: &Device,
    tolerance: f64,
    least: Option<f64>,
) -> Result<Rule, TrainError> {
    if !rounds(switches, device.target()) {
        return Ok(Rule::Tolerance(tolerance));
    }
    let wide = wide(switches, device.target())?;
    let exact = reference.compute(file, &wide, device)?;
    let mut narrow = Narrow { spread: Default::default(), least };
    for seed in 0..SHAKEN {
        let file_of = file.shaken(Some(seed));
        let computed = reference.compute(&file_of, &wide, device)?;
        for (name, error) in rule::errors((&file_of, &computed), (file, &exact)) {
            let worst = narrow.spread.entry(name).or_insert(0.0);
            // What is no number stays none, and allows nothing.
            *worst = if error <= *worst { *worst } else { error };
        }
    }
    Ok(Rule::Narrow(narrow))
}

/// What a differentiated recipe computes of a golden file.
pub struct Steps<'a> {
    /// The first is differentiated, the others are metrics.
    pub losses: Record<'a>,
    pub outputs: Record<'a>,
    pub feeds: &'a [(&'a str, Data<'a>)],
    /// Names of parameters that are not trained.
    pub frozen: &'a [&'a str],
    /// What the file calls a parameter.
    pub called: &'a dyn Fn(&str) -> String,
}

/// Everything that the file holds, over its steps and with its optimizer. Where passes round, or parameters are, what the model chooses is
/// taken from a run without that.
pub fn differentiated(file: &Golden, switches: &Switches, device: &Device, steps: &Steps) -> Result<Computed, TrainError> {
    if !rounds(switches, device.target()) && file.shaken.is_none() {
        return Ok(steps.run(file, switches, device, Choosing::Freely)?.0);
    }
    let wide = wide(switches, device.target())?;
    let (_, chosen) = steps.run(&file.shaken(None), &wide, device, Choosing::Noted)?;
    Ok(steps.run(file, switches, device, Choosing::Given(&chosen))?.0)
}

/// How the model chooses, run by run: of the outputs, then of every step.
#[derive(Clone, Copy)]
enum Choosing<'a> {
    Freely,
    /// Freely, and `run` returns what it chose.
    Noted,
    Given(&'a [Choices]),
}

impl Steps<'_> {
    fn run(&self, file: &Golden, switches: &Switches, device: &Device, choosing: Choosing) -> Result<(Computed, Vec<Choices>), TrainError> {
        let bad = |m: String| TrainError::Other(format!("this golden file {m}"));
        let o = &file.optimizer;
        let train = TrainConfig {
            beta1: o.beta1,
            beta2: o.beta2,
            eps: o.eps,
            weight_decay: o.weight_decay,
            clip: o.clip,
            optimizer: o.kind,
            momentum: o.momentum,
            ..TrainConfig::default()
        };
        let mut s = Session::new(device, switches, 0);
        let r = Recorder::new();
        let values = (self.losses)(&r);
        let params: Vec<_> = r.params().into_iter().filter(|p| !self.frozen.contains(&p.0.as_str())).collect();
        let grads = r.grad(values[0].1, &params.iter().map(|p| p.1).collect::<Vec<_>>());
        let step = crate::optim::step(&r, &params, &grads, values[0].1, &train);
        params.iter().zip(&grads).for_each(|((name, _), g)| r.output(&format!("grad/{name}"), *g));
        values.iter().for_each(|(name, v)| r.output(name, *v));
        r.output("grad_norm", step.norm);
        let metrics: Vec<&'static str> = values[1..].iter().map(|v| v.0).chain(["grad_norm"]).collect();
        let (loss, names): (&str, Vec<String>) = (values[0].0, params.iter().map(|p| p.0.clone()).collect());
        let mut noted: HashMap<&str, Vec<String>> = HashMap::new();
        let mut load = |s: &mut Session, name: &'static str, mut graph: Graph| {
            match choosing {
                Choosing::Freely => {}
                Choosing::Noted => drop(noted.insert(name, choices::note(&mut graph))),
                Choosing::Given(_) => choices::feed(&mut graph),
            }
            s.load(name, graph)
        };
        load(&mut s, "train", r.finish())?;

        let r = Recorder::new();
        let answers: Vec<&'static str> = (self.outputs)(&r)
            .into_iter()
            .map(|(name, v)| {
                r.output(name, v);
                name
            })
            .collect();
        load(&mut s, "outputs", r.finish())?;

        let untrained = s.store.iter().filter(|(n, t)| t.role == Role::Frozen || self.frozen.contains(n));
        let untrained: Vec<String> = untrained.map(|(n, _)| n.to_string()).collect();
        for name in names.iter().chain(&untrained) {
            let want = s.store.get(name).expect("just loaded").meta.shape.clone();
            let theirs = format!("param/{}", (self.called)(name));
            let numbers = file.f32(&theirs).ok_or_else(|| bad(format!("has no {theirs}")))?;
            let shape = file.shape(&theirs).unwrap_or_default();
            if shape != want {
                return Err(bad(format!("has {theirs} {shape:?}, but its config makes it {want:?}")));
            }
            s.store.set_floats(name, &Meta::f32(&shape), bytemuck::cast_slice(&numbers))?;
        }
        let rate = [o.lr as f32];
        let feeds = [self.feeds, &[("rate", Data::F32(&rate))]].concat();
        let mut chosen: Vec<Choices> = vec![];
        let mut run = |s: &mut Session, program: &str| -> Result<(), TrainError> {
            let given = if let Choosing::Given(all) = choosing { &all[chosen.len()][..] } else { &[] };
            let given: Vec<_> = given.iter().map(|(name, v)| (name.as_str(), Data::I32(v))).collect();
            s.run(program, &[&feeds[..], &given].concat())?;
            let read = |name: &String| Ok((name.clone(), s.read(program, name)?.into_iter().map(|v| v as i32).collect()));
            chosen.push(noted.get(program).into_iter().flatten().map(read).collect::<Result<_, TrainError>>()?);
            Ok(())
        };
        let mut out = Computed::new();
        run(&mut s, "outputs")?;
        for name in answers {
            out.insert(format!("output/{name}"), s.read("outputs", name)?);
        }
        for i in 0..file.steps {
            run(&mut s, "train")?;
            let mut push = |name: String, v: f64| out.entry(name).or_default().push(v as f32);
            push("loss".into(), s.scalar("train", loss)?);
            for name in &metrics {
                push(format!("metric/{name}"), s.scalar("train", name)?);
            }
            if i == 0 {
                for name in &names {
                    out.insert(format!("grad/{}", (self.called)(name)), s.read("train", &format!("grad/{name}"))?);
                }
            }
        }
        for name in &names {
            out.insert(format!("after/{}", (self.called)(name)), s.store.get(name).expect("loaded").f32()?);
        }
        Ok((out, chosen))
    }
}
