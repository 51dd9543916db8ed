//! A golden file's steps, computed here: one batch, whose examples are never done.

use super::carry::Carry;
use super::model::{Hrm, HrmConfig, STARTS};
use crate::config::Section;
use crate::golden::{Golden, Steps, differentiated};
use crate::recipe::{Computed, TrainError};
use engine::{DType, Data, Device, Recorder, Switches, Var};

pub fn segments(file: &Golden, switches: &Switches, device: &Device) -> Result<Computed, TrainError> {
    let bad = |m: String| TrainError::Other(format!("this golden file {m}"));
    let mut config = file.config.clone();
    // Files from before there was a choice say nothing of it.
    if let Some(table) = config.as_object_mut().filter(|t| !t.contains_key("mixer")) {
        let silent = HrmConfig::default();
        let sizes = [("state", silent.state), ("mamba_head", silent.mamba_head), ("conv", silent.conv)];
        table.insert("mixer".into(), "attention".into());
        table.extend(sizes.map(|(key, value)| (key.to_string(), value.into())));
    }
    let c = HrmConfig::from_json("model", &config).map_err(|e| bad(format!("has a config that hrm does not know: {e}")))?;
    c.check()?;
    let shape = file.shape("input/ids").filter(|s| s.len() == 2 && s[0] > 0 && s[1] == c.seq);
    let batch = shape.ok_or_else(|| bad(format!("has no input/ids [batch, {}] as its config says", c.seq)))?[0];
    let (Some(ids), Some(targets)) = (file.i32("input/ids"), file.i32("input/targets")) else {
        return Err(bad("has no whole numbers as input/ids and input/targets".into()));
    };
    let inside = |v: &i32, low: i32| *v >= low && (*v as i64) < c.vocab as i64;
    if ids.len() != targets.len() || !ids.iter().all(|v| inside(v, 0)) || !targets.iter().all(|v| inside(v, -1)) {
        return Err(bad("has ids or targets that do not fit its config".into()));
    }
    let feeds = [("ids", Data::I32(&ids)), ("targets", Data::I32(&targets))];
    let steps = Steps {
        losses: &|r| losses(&c, r, batch),
        outputs: &|r| outputs(&c, r, batch),
        feeds: &feeds,
        frozen: &STARTS,
        called: &str::to_string,
    };
    differentiated(file, switches, device, &steps)
}

fn feed<'g>(c: &HrmConfig, r: &'g Recorder, batch: usize, name: &str) -> Var<'g> {
    r.feed(name, &[batch, c.seq], DType::I32)
}

fn losses<'g>(c: &HrmConfig, r: &'g Recorder, batch: usize) -> Vec<(&'static str, Var<'g>)> {
    let m = Hrm { c, r };
    let states = Carry::states(r, c, batch, 0);
    let carry = states.refilled(&m, feed(c, r, batch, "ids"), feed(c, r, batch, "targets"), None);
    let segment = m.segment(carry.thought, carry.ids);
    let j = m.judge(&segment, carry.targets);
    states.keep(&Carry { done: r.zeros(&[batch]), ..carry.after(&segment, c.max_segments) });
    vec![("loss", j.loss), ("ce", j.ce), ("halting", j.halting), ("balance", j.balance), ("exact", j.right.mean())]
}

fn outputs<'g>(c: &HrmConfig, r: &'g Recorder, batch: usize) -> Vec<(&'static str, Var<'g>)> {
    let m = Hrm { c, r };
    let s = m.segment(m.start(), feed(c, r, batch, "ids"));
    vec![("high", s.thought.high), ("low", s.thought.low), ("halt", s.halt)]
}
