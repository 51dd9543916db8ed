//! A golden file's steps: a decoder of transformers', every weight trained. Its config is the model's config.json, its parameters have the names
//! of its safetensors.

use crate::golden::{Golden, Steps, differentiated};
use crate::models::Shape;
use crate::models::decoder::{Base, Decoder};
use crate::recipe::{Computed, TrainError};
use engine::{DType, Data, Device, Recorder, Switches, Var};
use std::collections::HashMap;

pub fn steps(file: &Golden, switches: &Switches, device: &Device) -> Result<Computed, TrainError> {
    let bad = |m: String| TrainError::Other(format!("this golden file {m}"));
    let table = file.config.as_object().ok_or_else(|| bad("has a config that is no table".into()))?;
    let shape = Shape::parse(table).map_err(|e| bad(format!("has a config of which this is not known: {e}")))?;
    let rows = file.shape("input/ids").filter(|s| s.len() == 2).ok_or_else(|| bad("has no input/ids [batch, time]".into()))?;
    let (Some(ids), Some(targets), Some(real)) = (file.i32("input/ids"), file.i32("input/targets"), file.f32("input/real")) else {
        return Err(bad("has no input/ids, input/targets and input/real".into()));
    };
    let inside = |v: &i32, low: i32| *v >= low && (*v as i64) < shape.vocab as i64;
    let fits = ids.len() == targets.len() && ids.len() == real.len() && rows[1] <= shape.context;
    if !fits || !ids.iter().all(|v| inside(v, 0)) || !targets.iter().all(|v| inside(v, -1)) {
        return Err(bad("has ids or targets that do not fit its config".into()));
    }
    let counted = targets.iter().filter(|t| **t >= 0).count();
    if counted == 0 {
        return Err(TrainError::AllMasked(0));
    }
    let weight = [1.0 / counted as f32];
    let feeds = [("ids", Data::I32(&ids)), ("targets", Data::I32(&targets)), ("weight", Data::F32(&weight)), ("real", Data::F32(&real))];
    let names: HashMap<String, String> = shape.weights().into_iter().map(|(ours, theirs, _)| (ours, theirs)).collect();
    let steps = Steps {
        losses: &|r| losses(&shape, r, &rows),
        outputs: &|r| outputs(&shape, r, &rows),
        feeds: &feeds,
        frozen: &[],
        called: &|name| names.get(name).cloned().unwrap_or_default(),
    };
    differentiated(file, switches, device, &steps)
}

fn hidden<'a, 'g>(shape: &'a Shape, r: &'g Recorder, rows: &[usize]) -> (Decoder<'a, 'g>, Var<'g>) {
    let d = Decoder { shape, lora: None, base: Base::Trained, r, rng: None };
    let hidden = d.hidden(r.feed("ids", rows, DType::I32), None);
    (d, hidden)
}

fn losses<'g>(shape: &Shape, r: &'g Recorder, rows: &[usize]) -> Vec<(&'static str, Var<'g>)> {
    let (d, hidden) = hidden(shape, r, rows);
    let targets = r.feed("targets", rows, DType::I32);
    vec![("loss", d.loss(hidden, targets, r.feed("weight", &[1], DType::F32)))]
}

/// Logits of tokens; padding's are zeros.
fn outputs<'g>(shape: &Shape, r: &'g Recorder, rows: &[usize]) -> Vec<(&'static str, Var<'g>)> {
    let (d, hidden) = hidden(shape, r, rows);
    vec![("logits", d.logits(hidden) * r.feed("real", &[rows[0], rows[1], 1], DType::F32))]
}
