//! A golden file's windows, computed here: the whole state after the last, and every window's metrics.

use super::model::BROKEN;
use super::{LiorConfig, Window, programs, reported, run};
use crate::config::Section;
use crate::golden::Golden;
use crate::recipe::{Computed, Session, TrainError, is_kept};
use engine::{DType, Device, Meta, Switches};
use std::collections::BTreeMap;

pub fn windows(file: &Golden, switches: &Switches, device: &Device) -> Result<Computed, TrainError> {
    let bad = |m: String| TrainError::Other(format!("this golden file {m}"));
    let shape = file.shape("input/ids").filter(|s| s.len() == 2 && s[0] > 0 && file.steps > 0);
    let shape = shape.ok_or_else(|| bad("has no input/ids [batch, tokens], or no steps".into()))?;
    let mut config = file.config.clone();
    let fields = config.as_object_mut().ok_or_else(|| bad("has a config that is no table".into()))?;
    let number = |v: Option<serde_json::Value>| v.and_then(|v| v.as_f64());
    let rate = number(fields.remove("learning_rate")).ok_or_else(|| bad("has no learning_rate in its config".into()))?;
    let whole = |name: &str| fields.get(name).and_then(|v| v.as_u64()).unwrap_or(0) as usize;
    // The reference knows neither: how many tokens follow is seen from the ids, and the encoder takes the steps in two goes.
    let after = shape[1].saturating_sub(whole("seq"));
    let rows = shape[0].saturating_mul(whole("seq")).saturating_mul(whole("steps").div_ceil(2));
    fields.insert("after".into(), after.into());
    fields.insert("rows".into(), rows.into());
    // Nor what was added to its rule, all of which is off.
    let added: [(&str, serde_json::Value); 6] = [
        ("decay", 0.0.into()),
        ("gauge", false.into()),
        ("nudge_every", 1.into()),
        ("probe", false.into()),
        ("encoder", "".into()),
        ("pretrain", false.into()),
    ];
    fields.extend(added.map(|(name, off)| (name.into(), off)));
    let c = LiorConfig::from_json("model", &config).map_err(|e| bad(format!("has a config that lior does not know: {e}")))?;
    c.check()?;
    let batch = shape[0];
    c.check_batch(batch, 1, file.steps)?;
    let (Some(ids), Some(mask)) = (file.i32("input/ids"), file.f32("input/mask")) else {
        return Err(bad("has no whole numbers as input/ids, or no input/mask".into()));
    };
    let inside = |v: &i32| (0..c.vocab as i64).contains(&(*v as i64));
    let counted = mask.len() == batch * c.seq && mask.chunks(c.seq).all(|row| row.iter().any(|&m| m != 0.0));
    if !ids.iter().all(inside) || !counted {
        return Err(bad("has ids or a mask that do not fit its config".into()));
    }
    let mut window = Window::new(&ids, &c, &[]);
    window.mask = mask.iter().map(|&m| (m != 0.0) as u8).collect();

    let graphs = programs(&c, batch, 1);
    let mut kept: BTreeMap<String, Meta> = BTreeMap::new();
    for (state, meta) in graphs.iter().flat_map(|(_, g)| g.states()) {
        if is_kept(&state.name) && state.name != BROKEN {
            kept.insert(state.name.clone(), meta.clone());
        }
    }
    // The file has the field as pairs (re, im).
    let field = |name: &str| ["field.re", "field.im"].iter().position(|f| *f == name);
    let theirs = |name: &str| if field(name).is_some() { "param/field".to_string() } else { format!("param/{name}") };
    for (name, meta) in &kept {
        let want = [&meta.shape[..], if field(name).is_some() { &[2] } else { &[] }].concat();
        if file.shape(&theirs(name)).is_none_or(|s| s != want) {
            return Err(bad(format!("has no {} {want:?}, as its config makes it", theirs(name))));
        }
    }
    let mut s = Session::new(device, switches, 0);
    for (name, graph) in graphs {
        s.load(name, graph)?;
    }
    for (name, meta) in &kept {
        let lacks = || bad(format!("has no numbers that fit as {}", theirs(name)));
        if meta.dtype == DType::I32 {
            let numbers = file.i32(&theirs(name)).filter(|n| n.iter().all(|&v| v >= 0)).ok_or_else(lacks)?;
            s.store.set(name, meta, bytemuck::cast_slice(&numbers))?;
            continue;
        }
        let mut numbers = file.f32(&theirs(name)).ok_or_else(lacks)?;
        if let Some(part) = field(name) {
            numbers = numbers.into_iter().skip(part).step_by(2).collect();
        }
        s.store.set(name, meta, bytemuck::cast_slice(&numbers))?;
    }

    let mut out = Computed::new();
    for _ in 0..file.steps {
        let reports = run(&mut s, Some([rate, 1.0]), std::iter::once(&window))?;
        let report = s.read(reports, "report")?;
        for (name, v) in reported(&c).iter().take(4).zip(report) {
            out.entry(format!("metric/{name}")).or_default().push(v);
        }
    }
    out.insert("loss".into(), out["metric/lior"].clone());
    let state = |name: &str| s.store.get(name).expect("loaded").f32();
    for name in kept.keys().filter(|n| field(n).is_none() && !n.starts_with("encoder.")) {
        out.insert(format!("after/{name}"), state(name)?);
    }
    let pairs = state("field.re")?.into_iter().zip(state("field.im")?).flat_map(|(re, im)| [re, im]);
    out.insert("after/field".into(), pairs.collect());
    Ok(out)
}
