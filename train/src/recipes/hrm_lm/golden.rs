//! A golden file's steps, computed here.

use super::model::{Fed, HrmLm, HrmLmConfig, Source, spread};
use crate::config::Section;
use crate::golden::{Golden, Steps, differentiated};
use crate::recipe::{Computed, TrainError};
use engine::ops::concat::concat;
use engine::{DType, Data, Device, Recorder, Switches, Var};

pub fn compute(file: &Golden, switches: &Switches, device: &Device) -> Result<Computed, TrainError> {
    let bad = |m: String| TrainError::Other(format!("this golden file {m}"));
    let mut config = file.config.clone();
    // The schedule of the gate is the trainer's: a file feeds the gate's scale.
    if let Some(table) = config.as_object_mut() {
        table.extend(["gate_warmup", "gate_ramp"].map(|key| (key.to_string(), 0.into())));
    }
    let c = HrmLmConfig::from_json("model", &config).map_err(|e| bad(format!("has a config that hrm_lm does not know: {e}")))?;
    c.check()?;
    let batch = file.shape("input/source").filter(|s| s.len() == 2 && s[0] > 0 && s[1] == c.source);
    let batch = batch.ok_or_else(|| bad(format!("has no input/source [batch, {}] as its config says", c.source)))?[0];
    c.check_batch(batch)?;
    let whole = |name: &str, least: i64| {
        let rows = if name == "input/source" { c.source } else { c.seq };
        let numbers = file.i32(name).filter(|_| file.shape(name) == Some(vec![batch, rows]));
        let numbers = numbers.ok_or_else(|| bad(format!("has no {name} [{batch}, {rows}] of whole numbers")))?;
        match numbers.iter().all(|&v| i64::from(v) >= least && i64::from(v) < c.vocab as i64) {
            true => Ok(numbers),
            false => Err(bad(format!("has {name} with tokens that are not of its vocabulary of {}", c.vocab))),
        }
    };
    let (source, tokens, targets) = (whole("input/source", 0)?, whole("input/tokens", 0)?, whole("input/targets", -1)?);
    let mask = file.f32("input/source_mask").filter(|m| m.len() == source.len() && m.chunks(c.source).all(|row| row.contains(&1.0)));
    let mask = mask.ok_or_else(|| bad("has no input/source_mask in which every row has a token".into()))?;
    let source: Vec<i32> = source.iter().zip(&mask).map(|(id, real)| if *real > 0.0 { *id } else { -1 }).collect();
    let scale = file.f32("input/gate_scale").filter(|s| s.len() == 1).ok_or_else(|| bad("has no input/gate_scale [1]".into()))?;
    let counted = targets.iter().filter(|t| **t >= 0).count();
    if counted == 0 {
        return Err(TrainError::AllMasked(0));
    }
    let weight = [1.0 / counted as f32];
    let feeds = [
        ("source", Data::I32(&source)),
        ("tokens", Data::I32(&tokens)),
        ("targets", Data::I32(&targets)),
        ("weight", Data::F32(&weight)),
        ("gate_scale", Data::F32(&scale)),
    ];
    let steps = Steps {
        losses: &|r| losses(&c, r, batch),
        outputs: &|r| outputs(&c, r, batch),
        feeds: &feeds,
        frozen: &[],
        called: &str::to_string,
    };
    differentiated(file, switches, device, &steps)
}

fn fed<'g>(c: &HrmLmConfig, r: &'g Recorder, batch: usize) -> Fed<'g> {
    let [tokens, targets] = ["tokens", "targets"].map(|name| r.feed(name, &[batch, c.seq], DType::I32));
    let [weight, gate_scale] = ["weight", "gate_scale"].map(|name| r.feed(name, &[1], DType::F32));
    Fed { source: Source::padded(r.feed("source", &[batch, c.source], DType::I32)), tokens, targets, weight, gate_scale }
}

/// The reference reports 0 where the config has no such thing.
fn losses<'g>(c: &HrmLmConfig, r: &'g Recorder, batch: usize) -> Vec<(&'static str, Var<'g>)> {
    let j = HrmLm { c, r, all_placed: false }.judge(&fed(c, r, batch), 1);
    let or_zero = |x: Option<Var<'g>>| x.unwrap_or_else(|| r.zeros(&[1]));
    let [mean, least, most] = spread(j.gate);
    vec![
        ("loss", j.loss),
        ("cross_entropy", j.cross_entropy),
        ("gate_mean", mean),
        ("gate_min", least),
        ("gate_max", most),
        ("halt_sum", or_zero(j.halt_sum)),
        ("balance", or_zero(j.balance)),
        ("supervision", or_zero(j.supervision)),
    ]
}

fn outputs<'g>(c: &HrmLmConfig, r: &'g Recorder, batch: usize) -> Vec<(&'static str, Var<'g>)> {
    let m = HrmLm { c, r, all_placed: false };
    let f = fed(c, r, batch);
    let thought = m.think(f.source);
    let last = thought.thoughts[c.cycles - 1];
    let gate = m.gate(&thought, f.gate_scale);
    let memory = m.memory(last, Some(gate));
    let logits = m.logits(m.decode(f.tokens, &[memory]));
    let halt = (!thought.halts.is_empty()).then(|| {
        let columns: Vec<Var> = thought.halts.iter().map(|h| h.reshape(&[batch, 1])).collect();
        ("halt", concat(&columns, 1))
    });
    let all = [
        ("pooled", thought.pooled),
        ("high", thought.high),
        ("low", thought.low),
        ("thought", last),
        ("gate", gate),
        ("memory", memory),
        ("logits", logits),
    ];
    all.into_iter().chain(halt).collect()
}
