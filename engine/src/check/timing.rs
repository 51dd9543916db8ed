//! Timing of the cases of ops.

use super::{Loaded, Numbers, fill, frozen, normals};
use crate::cpu::Data;
use crate::meta::DType;
use crate::op::Case;
use crate::passes::{Switches, Target};
use crate::program::Device;
use crate::record::Recorder;

/// The time of a case, forward or backward, and the least work that it needs.
pub struct Timing {
    /// Whether it is the backward pass.
    pub backward: bool,
    /// Milliseconds of one run.
    pub ms: f64,
    /// Floating-point operations of one run.
    pub flops: u64,
    /// Bytes read and written at least.
    pub bytes: u64,
}

/// The median of `repeat` runs of a case: forward, and on a GPU, which times every node, also backward.
pub fn time_case(case: &Case, dtype: DType, device: &Device, repeat: usize) -> Result<Vec<Timing>, String> {
    let r = Recorder::new();
    let mut feeds = vec![];
    let (mut leaves, mut inputs) = (vec![], vec![]);
    for (i, input) in case.inputs.iter().enumerate() {
        let numbers = fill(input.1, i as u64, input.0.iter().product());
        let leaf = r.feed(&format!("x{i}"), input.0, numbers.dtype());
        let float = numbers.dtype().is_float();
        inputs.push(if float { r.scope("inputs", || leaf.cast(dtype)) } else { leaf });
        if float && !frozen(case).contains(&i) {
            leaves.push(inputs[i]);
        }
        feeds.push((format!("x{i}"), numbers));
    }
    let outputs = r.scope("case", || (case.build)(&inputs));
    let gpu = device.target() != Target::Cpu;
    let mut terms = vec![];
    for (k, &y) in outputs.iter().enumerate() {
        r.output(&format!("y{k}"), y);
        if gpu && y.dtype().is_float() && !leaves.is_empty() {
            let c = r.feed(&format!("c{k}"), &y.shape(), DType::F32);
            feeds.push((format!("c{k}"), Numbers::F32(normals(k as u64, y.meta().elements()))));
            terms.push((y.cast(DType::F32) * c).sum());
        }
    }
    if let Some(loss) = terms.into_iter().reduce(|a, b| a + b) {
        for (i, g) in r.grad(loss, &leaves).into_iter().enumerate() {
            r.output(&format!("g{i}"), g);
        }
    }
    let mut p = Loaded::new(r.finish(), &Switches::default(), device)?;
    if !gpu {
        let mut times = vec![];
        for round in 0..repeat + 1 {
            let start = std::time::Instant::now();
            p.run(&feeds, &[])?;
            times.extend((round > 0).then_some(start.elapsed().as_secs_f64() * 1e3));
        }
        return Ok(vec![Timing { backward: false, ms: median(times), flops: p.program.flops, bytes: p.program.bytes }]);
    }
    let given: Vec<(&str, Data)> = feeds.iter().map(|(n, d)| (n.as_str(), d.data())).collect();
    let mut rounds: [Vec<Timing>; 2] = [vec![], vec![]];
    for round in 0..repeat + 1 {
        let nodes = p.program.profile(&mut p.store, &given).map_err(|e| e.to_string())?;
        for (backward, own) in [false, true].into_iter().zip(&mut rounds) {
            let nodes = nodes.iter().filter(|n| n.backward == backward && n.scope == "case");
            let t = nodes.fold(Timing { backward, ms: 0.0, flops: 0, bytes: 0 }, |t, n| Timing {
                backward,
                ms: t.ms + n.ms as f64,
                flops: t.flops + n.cost.flops,
                bytes: t.bytes + n.cost.bytes,
            });
            own.extend((round > 0 && t.ms > 0.0).then_some(t));
        }
    }
    let of_rounds = |own: Vec<Timing>| {
        let ms = median(own.iter().map(|t| t.ms).collect());
        own.into_iter().next().map(|t| Timing { ms, ..t })
    };
    Ok(rounds.into_iter().filter_map(of_rounds).collect())
}

/// The median; 0 if there are no numbers.
fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(0.0)
}
