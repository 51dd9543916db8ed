//! `kiln bench ops`: the time of every op.

use super::BenchArgs;
use super::fingerprint::together;
use super::serve::Served;
use super::stats::LEAST;
use crate::cli::write_json;
use crate::report::table;
use anyhow::{Context, Result, bail};
use engine::check::{case_fingerprint, time_case, time_unfused};
use engine::op::{Case, Entry, Fill, In};
use engine::passes::{Target, known};
use engine::{DType, Device};
use std::process::ExitCode;
use std::time::Instant;

/// What is timed of a case.
const DIRECTIONS: [&str; 2] = ["forward", "backward"];

/// Whether a direction of a case, as `op/case/forward`, has in it what --only says.
fn is_asked(a: &BenchArgs, op: &Entry, case: &Case, direction: &str) -> bool {
    format!("{}/{}/{direction}", op.name, case.name).contains(a.only.as_deref().unwrap_or_default())
}

/// The timed cases of which a direction is asked for.
fn timed(a: &BenchArgs) -> Result<Vec<(&'static Entry, &'static Case)>> {
    let all = engine::extension::ops().into_iter().flat_map(|o| o.cases.iter().filter(|c| c.bench).map(move |c| (o, c)));
    let found: Vec<_> = all.filter(|(o, c)| DIRECTIONS.iter().any(|d| is_asked(a, o, c, d))).collect();
    if found.is_empty() {
        let name = a.only.as_deref().unwrap_or_default();
        bail!("no op that is timed has '{name}' in its name{}", known(name, engine::extension::ops().into_iter().map(|o| o.name)));
    }
    Ok(found)
}

fn dtype(target: Target) -> DType {
    if target == Target::Cpu { DType::F32 } else { DType::BF16 }
}

pub fn fingerprint(a: &BenchArgs) -> Result<u64> {
    let target = super::fingerprint::target();
    let one = |case: &Case| case_fingerprint(case, dtype(target), target).map_err(anyhow::Error::msg);
    Ok(together(timed(a)?.into_iter().map(|(_, case)| one(case)).collect::<Result<Vec<_>>>()?))
}

/// One case, forward unless --only names its gradients, timed whenever it is asked for. Its work is one run.
pub fn serve(a: &BenchArgs) -> Result<ExitCode> {
    let [(op, case)] = timed(a)?[..] else { bail!("bench ops --serve: name one case (--only OP/CASE, or OP/CASE/backward)") };
    let backward = !is_asked(a, op, case, DIRECTIONS[0]);
    let device = &a.device.open()?;
    let once = || {
        let found = time_case(case, dtype(device.target()), device, a.repeat()).map_err(anyhow::Error::msg)?;
        found
            .iter()
            .find(|t| t.backward == backward)
            .map(|t| t.ms)
            .with_context(|| format!("{}/{}: gradients are timed on a GPU", op.name, case.name))
    };
    let first = once()?;
    let ready = serde_json::json!({ "ms": first, "device": device.describe() });
    Served { device, work: 1.0, unit: "runs", ready }.serve(|least| {
        let (mut times, clock) = (vec![], Instant::now());
        while times.len() < LEAST || clock.elapsed() < least {
            times.push(once()?);
        }
        Ok(times)
    })
}

/// `--unfused`: fused and composite ops beside the plain ops that define them, in turn.
fn unfused(a: &BenchArgs, cases: Vec<(&'static Entry, &'static Case)>, device: &Device) -> Result<ExitCode> {
    let (mut rows, mut json, mut left_out) = (vec![], vec![], vec![]);
    for (op, case) in cases {
        let both = match time_unfused(case, dtype(device.target()), device, a.repeat()) {
            Ok(Some(both)) => both,
            Ok(None) => continue,
            Err(why) => {
                left_out.push(format!("{}, {}: {why}", op.name, case.name));
                continue;
            }
        };
        let [fused, plain] = both;
        for (fused, plain) in fused.iter().filter_map(|f| Some((f, plain.iter().find(|p| p.backward == f.backward)?))) {
            let direction = DIRECTIONS[usize::from(fused.backward)];
            if !is_asked(a, op, case, direction) {
                continue;
            }
            let times = plain.ms / fused.ms;
            rows.push(vec![
                op.name.into(),
                case.name.into(),
                direction.into(),
                format!("{:.3}", fused.ms),
                format!("{:.3}", plain.ms),
                format!("{times:.2}x"),
            ]);
            json.push(serde_json::json!({
                "op": op.name, "case": case.name, "direction": direction, "ms": fused.ms, "unfused_ms": plain.ms, "times_as_fast": times,
            }));
        }
    }
    if rows.is_empty() && left_out.is_empty() {
        bail!("--unfused: none of these ops is defined by others");
    }
    out_part!("{}", table(&["op", "case", "", "ms", "unfused, ms", "times as fast"], &rows));
    for why in left_out {
        out!("left out: {why}");
    }
    if let Some(path) = &a.json {
        write_json(Some(path), &serde_json::Value::Array(json))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Every op at the recipes' shapes. On a GPU in bf16, forward and backward, compared with what the card reaches in a copy and in a large GEMM.
pub fn ops(a: &BenchArgs) -> Result<ExitCode> {
    let timed = timed(a)?;
    let device = &a.device.open()?;
    if a.unfused {
        return unfused(a, timed, device);
    }
    let (mut rows, mut json) = (vec![], vec![]);
    let gpu = match device {
        Device::Cuda(cuda, _) => Some(cuda),
        Device::Cpu(..) => None,
    };
    let dtype = dtype(device.target());
    let ceilings = match gpu {
        Some(cuda) => {
            let product =
                Case::new("ceiling", &[In(&[8192, 8192], Fill::Normal), In(&[8192, 8192], Fill::Normal)], |x| vec![x[0].matmul(x[1])]);
            let t = time_case(&product, dtype, device, 5).map_err(anyhow::Error::msg)?;
            let (copy, flops) = (cuda.copy_speed()?, t[0].flops as f64 / t[0].ms * 1e3);
            out!(
                "{}, {dtype}: a copy reads and writes {:.2} TB/s, a product of 8192^3 makes {:.0} TFLOP/s",
                device.describe(),
                copy / 1e12,
                flops / 1e12
            );
            Some((copy, flops))
        }
        None => None,
    };
    for (op, case) in timed {
        for t in time_case(case, dtype, device, a.repeat()).map_err(anyhow::Error::msg)? {
            let (bytes, flops) = (t.bytes as f64 / t.ms * 1e3, t.flops as f64 / t.ms * 1e3);
            // Of the two limits, the one that it is closer to is its bottleneck.
            let share =
                ceilings.map(
                    |(copy, product)| {
                        if bytes / copy > flops / product { (bytes / copy, "memory") } else { (flops / product, "arithmetic") }
                    },
                );
            let direction = DIRECTIONS[usize::from(t.backward)];
            if !is_asked(a, op, case, direction) {
                continue;
            }
            rows.push(vec![
                op.name.into(),
                case.name.into(),
                direction.into(),
                format!("{:.3}", t.ms),
                format!("{:.1}", bytes / 1e9),
                format!("{:.2}", flops / 1e12),
                share.map_or("-".into(), |(s, what)| format!("{:.0}% {what}", 100.0 * s)),
            ]);
            json.push(serde_json::json!({
                "op": op.name, "case": case.name, "direction": direction, "ms": t.ms, "gb_s": bytes / 1e9, "tflop_s": flops / 1e12,
                "share": share.map(|s| s.0), "bound": share.map(|s| s.1),
            }));
        }
    }
    out_part!("{}", table(&["op", "case", "", "ms", "GB/s", "TFLOP/s", "of the ceiling"], &rows));
    if let Some(path) = &a.json {
        write_json(Some(path), &serde_json::Value::Array(json))?;
    }
    Ok(ExitCode::SUCCESS)
}
