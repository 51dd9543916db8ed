//! `kiln bench ops`: the time of every op.

use super::BenchArgs;
use crate::cli::write_json;
use crate::report::table;
use anyhow::{Result, bail};
use engine::DType;
use engine::check::time_case;
use engine::op::{Case, Fill, In};
use engine::passes::known;
use std::process::ExitCode;

/// Every op at the recipes' shapes. On a GPU in bf16, forward and backward, compared with what the card reaches in a copy and in a large GEMM.
pub fn ops(a: &BenchArgs, device: &engine::Device) -> Result<ExitCode> {
    let wanted = |name: &str| a.only.as_deref().is_none_or(|part| name.contains(part));
    let timed = || {
        engine::extension::ops()
            .into_iter()
            .filter(|o| wanted(o.name))
            .flat_map(|o| o.cases.iter().filter(|c| c.bench).map(move |c| (o, c)))
    };
    if timed().next().is_none() {
        let name = a.only.as_deref().unwrap_or_default();
        bail!("no op that is timed has '{name}' in its name{}", known(name, engine::extension::ops().into_iter().map(|o| o.name)));
    }
    let (mut rows, mut json) = (vec![], vec![]);
    let gpu = match device {
        engine::Device::Cuda(cuda, _) => Some(cuda),
        engine::Device::Cpu(..) => None,
    };
    let dtype = if gpu.is_some() { DType::BF16 } else { DType::F32 };
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
    for (op, case) in timed() {
        for t in time_case(case, dtype, device, a.repeat()).map_err(anyhow::Error::msg)? {
            let (bytes, flops) = (t.bytes as f64 / t.ms * 1e3, t.flops as f64 / t.ms * 1e3);
            // Of the two limits, the one that it is closer to is its bottleneck.
            let share =
                ceilings.map(
                    |(copy, product)| {
                        if bytes / copy > flops / product { (bytes / copy, "memory") } else { (flops / product, "arithmetic") }
                    },
                );
            let direction = if t.backward { "backward" } else { "forward" };
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
