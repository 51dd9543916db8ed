//! What a device can do at most: its arithmetic by type, and its memory.

use engine::profile::Node;
use engine::{Cuda, DType, Data, Device, Init, Program, Recorder, Store, Switches};
use serde::Serialize;
use std::time::Instant;

/// FLOP/s and bytes a second that no kernel exceeds; None where it is not known.
#[derive(Clone, Debug, Serialize, PartialEq)]
pub struct Roof {
    /// Dense, on tensor cores, with FP8 inputs.
    pub fp8: Option<f64>,
    /// The same with bf16 or f16 inputs.
    pub half: Option<f64>,
    /// The same with f32 inputs rounded to TF32.
    pub tf32: Option<f64>,
    /// f32 without tensor cores.
    pub f32: Option<f64>,
    /// Bytes a second.
    pub memory: Option<f64>,
    /// Where the figures come from.
    pub from: String,
}

/// (in the card's name, TFLOP/s with FP8, half, TF32 and f32, TB/s): NVIDIA's data sheets, dense. The first that fits counts.
const CARDS: &[(&str, [f64; 5])] = &[
    ("B200", [4500.0, 2250.0, 1125.0, 75.0, 8.0]),
    ("GH200", [1979.0, 989.4, 494.7, 66.9, 4.0]),
    ("H200", [1979.0, 989.4, 494.7, 66.9, 4.8]),
    ("H100 PCIe", [1513.0, 756.0, 378.0, 51.2, 2.0]),
    ("H100", [1979.0, 989.4, 494.7, 66.9, 3.35]),
    ("A100-SXM4-40GB", [0.0, 312.0, 156.0, 19.5, 1.555]),
    ("A100-PCIE-40GB", [0.0, 312.0, 156.0, 19.5, 1.555]),
    ("A100", [0.0, 312.0, 156.0, 19.5, 2.039]),
    ("L40S", [733.0, 362.0, 183.0, 91.6, 0.864]),
    ("RTX 4090", [330.3, 165.2, 82.6, 82.6, 1.008]),
    ("RTX 3090", [0.0, 71.0, 35.6, 35.6, 0.936]),
];

impl Roof {
    pub fn of(device: &Device) -> Roof {
        match device {
            Device::Cpu(..) => Roof::of_cpu(device),
            Device::Cuda(cuda, _) => Roof::of_card(cuda.name()).unwrap_or_else(|| Roof::measured(cuda)),
        }
    }

    pub(crate) fn of_card(name: &str) -> Option<Roof> {
        let (card, figures) = CARDS.iter().find(|c| name.contains(c.0))?;
        let [fp8, half, tf32, f32, memory] = figures.map(|f| (f > 0.0).then_some(f * 1e12));
        Some(Roof { fp8, half, tf32, f32, memory, from: format!("data sheet of the {card}, dense") })
    }

    /// Of a card that is not in the table, only its memory is known, by copying.
    fn measured(cuda: &Cuda) -> Roof {
        let from = "a copy on the card, which is not in kiln's table: its arithmetic is unknown".into();
        Roof { fp8: None, half: None, tf32: None, f32: None, memory: cuda.copy_speed().ok(), from }
    }

    /// Of a CPU both are measured: a matmul and a sum that fit into no cache.
    fn of_cpu(device: &Device) -> Roof {
        const N: usize = 768;
        const LONG: usize = 1 << 23;
        let flops = best(device, &[N, N], |r| {
            let x = r.feed("x", &[N, N], DType::F32);
            x.matmul(r.param("w", &[N, N], Init::Normal { std: 1.0 }))
        });
        let bytes = best(device, &[LONG], |r| -r.feed("x", &[LONG], DType::F32));
        let from = "a matmul and an element-wise op, measured here".into();
        let memory = bytes.map(|s| 8.0 * LONG as f64 / s);
        Roof { fp8: None, half: None, tf32: None, f32: flops.map(|s| 2.0 * (N * N * N) as f64 / s), memory, from }
    }

    /// FLOP/s that a node's kernels could reach.
    pub fn flops(&self, node: &Node) -> Option<f64> {
        let narrowest = node.inputs.iter().map(|m| m.dtype).filter(|d| d.is_float()).min_by_key(|d| d.size());
        match narrowest {
            _ if !node.tensor_cores => self.f32,
            Some(DType::F32) | None => self.tf32,
            Some(DType::BF16 | DType::F16) => self.half,
            Some(_) => self.fp8,
        }
    }

    /// Seconds that a node takes at least, and what bounds it. None where neither is known.
    pub fn seconds(&self, node: &Node) -> Option<(f64, Bound)> {
        let compute = self.flops(node).map(|peak| node.cost.flops as f64 / peak);
        let memory = self.memory.map(|peak| node.cost.bytes as f64 / peak);
        let bounds = [(compute, Bound::Compute), (memory, Bound::Memory)];
        bounds.into_iter().filter_map(|(s, bound)| Some((s?, bound))).max_by(|a, b| a.0.total_cmp(&b.0))
    }
}

/// What limits a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Bound {
    Compute,
    Memory,
}

/// Seconds of the fastest of a few runs.
fn best(device: &Device, shape: &[usize], record: impl for<'g> FnOnce(&'g Recorder) -> engine::Var<'g>) -> Option<f64> {
    let r = Recorder::new();
    let y = record(&r);
    r.output("y", y);
    let mut store = Store::new(0);
    let mut program = Program::load(r.finish(), &Switches::default(), device, &mut store).ok()?;
    let x = vec![1.0f32; shape.iter().product()];
    let mut times = vec![];
    for _ in 0..4 {
        let start = Instant::now();
        program.run(&mut store, &[("x", Data::F32(&x))]).ok()?;
        times.push(start.elapsed().as_secs_f64());
    }
    times.into_iter().min_by(f64::total_cmp)
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::Meta;
    use engine::op::Cost;

    fn node(dtype: DType, tensor_cores: bool, flops: u64, bytes: u64) -> Node {
        let inputs = vec![Meta { shape: vec![1], dtype }];
        let cost = Cost { flops, bytes, memory_bound: false };
        Node { op: "matmul", scope: String::new(), backward: false, outputs: inputs.clone(), inputs, cost, tensor_cores }
    }

    #[test]
    fn a_node_is_bound_by_what_takes_longer() {
        let roof = Roof::of_card("NVIDIA H200").unwrap();
        let near = |a: (f64, Bound), b: (f64, Bound)| (a.0 / b.0 - 1.0).abs() < 1e-9 && a.1 == b.1;
        let half = node(DType::BF16, true, 989_400_000_000, 1);
        assert!(near(roof.seconds(&half).unwrap(), (1e-3, Bound::Compute)));
        assert!(near(roof.seconds(&node(DType::BF16, true, 1, 4_800_000_000)).unwrap(), (1e-3, Bound::Memory)));
        assert!(near(roof.seconds(&node(DType::F32, false, 66_900_000_000, 1)).unwrap(), (1e-3, Bound::Compute)));
        assert!(near(roof.seconds(&node(DType::E4M3, true, 1_979_000_000_000, 1)).unwrap(), (1e-3, Bound::Compute)));
        assert_eq!(Roof::of_card("NVIDIA A100-SXM4-80GB").unwrap().fp8, None);
        assert_eq!(Roof::of_card("some card"), None);
    }
}
