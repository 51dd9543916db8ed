//! What a device can do at most: its arithmetic by type, and its memory.

use engine::profile::Node;
use engine::{Cuda, DType, Data, Device, Init, Program, Recorder, Store, Switches};
use serde::Serialize;
use std::time::Instant;

/// FLOP/s and bytes a second that no kernel exceeds; None where it is not known.
#[derive(Clone, Debug, Default, Serialize, PartialEq)]
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

/// (words of the card's name, TFLOP/s with FP8, half, TF32 and f32, TB/s): NVIDIA's data sheets, dense, sums in f32; 0 where it has none or it is not known.
/// The first that fits counts.
const CARDS: &[(&str, [f64; 5])] = &[
    ("GB300", [5000.0, 2500.0, 1250.0, 0.0, 8.0]),
    ("B300", [4500.0, 2250.0, 1125.0, 75.0, 8.0]),
    ("GB200", [5000.0, 2500.0, 1250.0, 80.0, 8.0]),
    ("B200", [4500.0, 2250.0, 1125.0, 75.0, 8.0]),
    ("B100", [3500.0, 1750.0, 875.0, 60.0, 8.0]),
    ("GH200", [1979.0, 989.4, 494.7, 66.9, 4.0]),
    ("H200 NVL", [1670.5, 835.5, 417.5, 60.0, 4.8]),
    ("H200", [1979.0, 989.4, 494.7, 66.9, 4.8]),
    ("H100 NVL", [1670.5, 835.5, 417.5, 60.0, 3.9]),
    ("H100 PCIe", [1513.0, 756.0, 378.0, 51.2, 2.0]),
    ("H100", [1979.0, 989.4, 494.7, 66.9, 3.35]),
    ("H20", [296.0, 148.0, 74.0, 44.0, 4.0]),
    ("A100-SXM4-40GB", [0.0, 312.0, 156.0, 19.5, 1.555]),
    ("A100-PCIE-40GB", [0.0, 312.0, 156.0, 19.5, 1.555]),
    ("A100 80GB PCIe", [0.0, 312.0, 156.0, 19.5, 1.935]),
    ("A100", [0.0, 312.0, 156.0, 19.5, 2.039]),
    ("A40", [0.0, 149.7, 74.8, 37.4, 0.696]),
    ("A10", [0.0, 125.0, 62.5, 31.2, 0.6]),
    ("L40S", [733.0, 362.0, 183.0, 91.6, 0.864]),
    ("L40", [362.0, 181.0, 90.5, 90.5, 0.864]),
    ("L4", [242.5, 121.0, 60.0, 30.3, 0.3]),
    ("RTX A6000", [0.0, 154.8, 77.4, 38.7, 0.768]),
    ("RTX 6000 Ada", [728.5, 364.2, 182.1, 91.1, 0.96]),
    ("RTX 5090", [419.0, 209.5, 104.8, 104.8, 1.792]),
    ("RTX 4090", [330.3, 165.2, 82.6, 82.6, 1.008]),
    ("RTX 4080", [194.9, 97.5, 48.7, 48.7, 0.717]),
    ("RTX 3090", [0.0, 71.0, 35.6, 35.6, 0.936]),
    ("RTX 3080", [0.0, 59.5, 29.8, 29.8, 0.76]),
];

/// What in a name makes it another card than the one in the table.
const OTHERS: &[&str] = &["Ti", "SUPER", "D", "Laptop", "Mobile", "Max", "3e", "MIG"];

impl Roof {
    pub fn of(device: &Device) -> Roof {
        match device {
            Device::Cpu(cpu, _) => Roof::of_cpu(device, cpu.threads()),
            Device::Cuda(cuda, _) => Roof::of_card(cuda.name()).unwrap_or_else(|| Roof::measured(cuda)),
        }
    }

    /// A card's data sheet, by the name that the driver gives it. None for a card that is not in the table, and for a part of one (MIG).
    pub(crate) fn of_card(name: &str) -> Option<Roof> {
        let words = |name: &str| name.split([' ', '-']).map(str::to_owned).collect::<Vec<_>>();
        let of_device = words(name);
        let (card, figures) = CARDS.iter().find(|(card, _)| {
            let card = words(card);
            of_device.windows(card.len()).any(|part| part == card)
        })?;
        if of_device.iter().any(|word| OTHERS.contains(&word.as_str())) {
            return None;
        }
        let [fp8, half, tf32, f32, memory] = figures.map(|f| (f > 0.0).then_some(f * 1e12));
        Some(Roof { fp8, half, tf32, f32, memory, from: format!("data sheet of the {card}, dense") })
    }

    /// Of a card that is not in the table, only its memory is known, by copying.
    fn measured(cuda: &Cuda) -> Roof {
        let from = "a copy on the card, which is not in kiln's table: its arithmetic is unknown".into();
        Roof { fp8: None, half: None, tf32: None, f32: None, memory: cuda.copy_speed().ok(), from }
    }

    /// Of a CPU both are measured: a matmul, and a copy that fits into no cache.
    fn of_cpu(device: &Device, threads: usize) -> Roof {
        const N: usize = 768;
        let flops = matmul_seconds(device, N).map(|s| 2.0 * (N * N * N) as f64 / s);
        let from = "a matmul and a copy, measured here, or a node of the step where that was faster".into();
        Roof { fp8: None, half: None, tf32: None, f32: flops, memory: Some(copy_speed(threads)), from }
    }

    /// A measured roof is what nothing was seen to exceed, so a node that took only so many seconds raises it. Where that is a few microseconds, the clock
    /// says too little.
    pub fn raise(&mut self, node: &Node, seconds: f64) {
        if seconds >= 5e-6 {
            self.f32 = self.f32.map(|peak| peak.max(node.cost.flops as f64 / seconds));
            self.memory = self.memory.map(|peak| peak.max(node.cost.bytes as f64 / seconds));
        }
    }

    /// FLOP/s that a node's kernels could reach.
    pub fn flops(&self, node: &Node) -> Option<f64> {
        let narrowest = node.inputs.iter().map(|m| m.dtype).filter(|d| d.is_float() || d.is_fp8()).min_by_key(|d| d.size());
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
    /// Neither: too little work to fill the device.
    Latency,
}

/// How often each is measured; the fastest counts.
const TRIES: usize = 4;

/// Seconds of a matmul of f32.
fn matmul_seconds(device: &Device, n: usize) -> Option<f64> {
    let r = Recorder::new();
    let x = r.feed("x", &[n, n], DType::F32);
    r.output("y", x.matmul(r.param("w", &[n, n], Init::Normal { std: 1.0 })));
    let mut store = Store::new(0);
    let mut program = Program::load(r.finish(), &Switches::default(), device, &mut store).ok()?;
    let x = vec![1.0f32; n * n];
    let mut times = vec![];
    for _ in 0..TRIES {
        let start = Instant::now();
        program.run(&mut store, &[("x", Data::F32(&x))]).ok()?;
        times.push(start.elapsed().as_secs_f64());
    }
    times.into_iter().min_by(f64::total_cmp)
}

/// Bytes a second that threads read and write when each copies its part.
fn copy_speed(threads: usize) -> f64 {
    const BYTES: usize = 1 << 26;
    let (from, mut to) = (vec![1u8; BYTES], vec![0u8; BYTES]);
    let part = BYTES.div_ceil(threads.max(1));
    let seconds = (0..TRIES).map(|_| {
        let start = Instant::now();
        std::thread::scope(|s| {
            for (from, to) in from.chunks(part).zip(to.chunks_mut(part)) {
                s.spawn(|| to.copy_from_slice(from));
            }
        });
        start.elapsed().as_secs_f64()
    });
    2.0 * BYTES as f64 / seconds.fold(f64::MAX, f64::min)
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::Meta;
    use engine::op::Cost;

    fn node(dtype: DType, tensor_cores: bool, flops: u64, bytes: u64) -> Node {
        let inputs = vec![Meta { shape: vec![1], dtype }];
        let cost = Cost { flops, bytes, memory_bound: false };
        Node {
            op: "matmul",
            scope: String::new(),
            backward: false,
            outputs: inputs.clone(),
            inputs,
            cost,
            tensor_cores,
            multiprocessors: None,
            aside: false,
        }
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

    /// Names as the driver writes them.
    #[test]
    fn a_card_is_found_by_its_whole_name() {
        let half = |name: &str| Roof::of_card(name).and_then(|r| r.half).map(|f| f / 1e12);
        let known = [
            ("NVIDIA A10", 125.0),
            ("NVIDIA A100-SXM4-80GB", 312.0),
            ("NVIDIA A100 80GB PCIe", 312.0),
            ("NVIDIA RTX A6000", 154.8),
            ("NVIDIA RTX 6000 Ada Generation", 364.2),
            ("NVIDIA L4", 121.0),
            ("NVIDIA L40", 181.0),
            ("NVIDIA L40S", 362.0),
            ("NVIDIA GeForce RTX 4090", 165.2),
            ("NVIDIA H20", 148.0),
            ("NVIDIA H200", 989.4),
            ("NVIDIA H200 NVL", 835.5),
            ("NVIDIA H100 80GB HBM3", 989.4),
            ("NVIDIA H100 PCIe", 756.0),
            ("NVIDIA H100 NVL", 835.5),
            ("NVIDIA GH200 480GB", 989.4),
            ("NVIDIA B200", 2250.0),
            ("NVIDIA GB200", 2500.0),
        ];
        for (name, expected) in known {
            assert_eq!(half(name), Some(expected), "{name}");
        }
        let other = [
            "A10G",
            "GeForce RTX 4090 Laptop GPU",
            "GeForce RTX 3080 Ti",
            "GeForce RTX 4080 SUPER",
            "GeForce RTX 5090 D",
            "Quadro RTX 6000",
            "H20-3e",
        ];
        for name in other.into_iter().chain(["NVIDIA A100-SXM4-80GB MIG 1g.10gb", "", "H", "H2000"]) {
            assert_eq!(half(name), None, "{name}");
        }
        let memory = |name: &str| Roof::of_card(name).and_then(|r| r.memory).map(|f| f / 1e12);
        assert_eq!(["A100-SXM4-40GB", "A100-SXM4-80GB", "A100 80GB PCIe"].map(memory), [1.555, 2.039, 1.935].map(Some));
    }
}
