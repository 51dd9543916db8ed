//! kiln against the numbers that plain PyTorch computed.

use engine::philox::philox;
use engine::{Cpu, Device, Switches};
use kiln::golden::{Golden, Rule, compare, compare_with, rule};
use kiln::recipe;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use std::fs;
use std::path::PathBuf;

fn file() -> Golden {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../reference/golden/hydra.safetensors");
    Golden::open(&path).unwrap()
}

fn computed(file: &Golden, switches: &Switches) -> recipe::Computed {
    recipe::find(&file.recipe).unwrap().reference().unwrap().compute(file, switches, &Device::cpu(Cpu::new(2))).unwrap()
}

/// The rule for a run with these switches.
fn by(file: &Golden, switches: &Switches) -> Rule {
    let reference = recipe::find(&file.recipe).unwrap().reference().unwrap();
    rule(reference, file, switches, &Device::cpu(Cpu::new(2)), 1e-5, None).unwrap()
}

#[test]
fn hydra_with_every_pass_setting() {
    let settings: [&[(&str, &str)]; 4] = [
        &[],
        &[("recompute", "require,what=blocks")],
        &[("recompute", "require,what=memory-bound"), ("linear-cross-entropy", "require,chunk=7")],
        &[
            ("flash-attention", "off"),
            ("linear-cross-entropy", "off"),
            ("fuse-norm", "off"),
            ("fuse-qk-norm", "off"),
            ("dead-code", "off"),
            ("fuse-pointwise", "off"),
            ("in-place", "off"),
        ],
    ];
    let golden = file();
    for setting in settings {
        let mut switches = Switches::default();
        setting.iter().for_each(|(name, value)| switches.set(name, value).unwrap());
        let all = compare(&golden, &computed(&golden, &switches), &by(&golden, &switches));
        assert_eq!(all.len(), 2 * 56 + 5, "every parameter's gradient and next value, losses, metrics, outputs");
        let bad: Vec<String> = all.iter().filter(|c| !c.ok).map(|c| format!("{} off by {:.2e}", c.name, c.error)).collect();
        assert!(bad.is_empty(), "{setting:?}: {bad:?}");
    }
}

#[test]
fn hydra_in_bf16_points_the_same_way() {
    let golden = file();
    for residual in ["bf16", "f32"] {
        let switches = Switches::default().with("bf16", &format!("require,residual={residual}")).unwrap();
        let all = compare(&golden, &computed(&golden, &switches), &by(&golden, &switches));
        let bad: Vec<String> = all.iter().filter(|c| !c.ok).map(|c| format!("{} cosine {:.4}", c.name, c.cosine)).collect();
        assert!(bad.is_empty(), "{residual}: {bad:?}");
    }
    assert!(Switches::default().with("bf16", "auto,residul=f32").is_err());
}

#[test]
fn one_percent_in_one_tensor_fails_by_its_name() {
    let golden = file();
    let right = computed(&golden, &Switches::default());
    for name in ["loss", "grad/blocks.1.attn.temperature", "after/embedding", "output/hidden"] {
        let mut wrong = right.clone();
        wrong.get_mut(name).unwrap().iter_mut().for_each(|v| *v *= 1.01);
        let failed: Vec<String> = compare(&golden, &wrong, &Rule::Tolerance(1e-4)).into_iter().filter(|c| !c.ok).map(|c| c.name).collect();
        assert_eq!(failed, [name]);
    }
    let mut missing = right.clone();
    missing.remove("grad/norm");
    assert!(compare(&golden, &missing, &Rule::Tolerance(1e-4)).iter().any(|c| c.name == "grad/norm" && !c.ok));
    let mut broken = right;
    broken.get_mut("loss").unwrap()[1] = f32::NAN;
    assert!(compare(&golden, &broken, &Rule::Tolerance(1e-4)).iter().any(|c| c.name == "loss" && !c.ok));
}

#[test]
fn vision_bdh_with_passes_on_and_off() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../reference/golden/vision_bdh.safetensors");
    let golden = Golden::open(std::path::Path::new(path)).unwrap();
    let settings = [
        ("linear-attention", "require"),
        ("linear-attention", "off"),
        ("recompute", "auto"),
        ("recompute", "auto,what=blocks"),
        ("gemm-epilogue", "off"),
        ("bf16", "auto"),
        ("bf16", "auto,residual=f32"),
    ];
    for setting in settings {
        let switches = Switches::default().with(setting.0, setting.1).unwrap();
        let device = Device::cpu(Cpu::new(2));
        let computed = kiln::recipe::find("vision_bdh").unwrap().reference().unwrap().compute(&golden, &switches, &device).unwrap();
        let all = compare(&golden, &computed, &by(&golden, &switches));
        assert_eq!(all.len(), 2 * 9 + 4);
        let bad: Vec<String> = all.iter().filter(|c| !c.ok).map(|c| format!("{} off by {:.2e}", c.name, c.error)).collect();
        assert!(bad.is_empty(), "{setting:?}: {bad:?}");
    }
}

/// A golden file of another model: every parameter's numbers in another order.
fn shuffled(path: &str, seed: u32) -> Golden {
    let bytes = fs::read(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let numbers = |name: &str, view: &TensorView| {
        let mut all: Vec<[u8; 4]> = view.data().chunks_exact(4).map(|b| b.try_into().unwrap()).collect();
        for i in (1..all.len()).rev() {
            all.swap(i, philox([i as u32, name.len() as u32, seed, 0], [1, 2])[0] as usize % (i + 1));
        }
        all.concat()
    };
    let changed: Vec<(String, TensorView, Vec<u8>)> = file
        .tensors()
        .into_iter()
        .map(|(name, view)| {
            let data = if name.starts_with("param/") { numbers(&name, &view) } else { view.data().to_vec() };
            (name, view, data)
        })
        .collect();
    let views = changed.iter().map(|(name, v, data)| (name, TensorView::new(v.dtype(), v.shape().to_vec(), data).unwrap()));
    Golden::read(path, safetensors::serialize(views, header.metadata().clone()).unwrap()).unwrap()
}

/// Whatever is random about a model: in bf16 it does what it does in f32, but for rounding. Routers are handed what they choose in f32.
#[test]
fn in_bf16_models_of_several_seeds_do_as_in_f32() {
    for path in ["../reference/golden/hydra", "../reference/golden/hrm", "tests/golden/hrm-top3", "../reference/golden/vision_bdh"] {
        for seed in 1..=3 {
            let file = shuffled(&format!("{path}.safetensors"), seed);
            let narrow = Switches::default().with("bf16", "require").unwrap();
            let half = computed(&file, &narrow);
            let all = compare_with(&computed(&file, &Switches::default()), &file, &half, &by(&file, &narrow));
            let bad: Vec<String> = all.iter().filter(|c| !c.ok).map(|c| format!("{} cosine {:.4}", c.name, c.cosine)).collect();
            assert!(bad.is_empty() && all.iter().any(|c| c.name.starts_with("after/")), "{path}, seed {seed}: {bad:?}");
        }
    }
}

/// What the rule for narrow types is there to find.
#[test]
fn in_bf16_a_step_that_does_not_move_a_loss_and_a_sign_fail_by_their_names() {
    let golden = file();
    let right = computed(&golden, &Switches::default());
    let rule = by(&golden, &Switches::default().with("bf16", "auto").unwrap());
    let failed = |change: &dyn Fn(&str, &mut Vec<f32>)| {
        let mut wrong = right.clone();
        wrong.iter_mut().for_each(|(name, v)| change(name, v));
        let all = compare(&golden, &wrong, &rule);
        all.into_iter().filter(|c| !c.ok).map(|c| c.name).collect::<Vec<_>>()
    };
    assert_eq!(failed(&|_, _| {}), [""; 0]);
    let still = failed(&|name, v| {
        if let Some(own) = name.strip_prefix("after/") {
            *v = golden.f32(&format!("param/{own}")).unwrap();
        }
    });
    assert_eq!(still, right.keys().filter(|n| n.starts_with("after/")).cloned().collect::<Vec<_>>());
    let scaled = |name: &'static str, by: f32| {
        failed(&move |n, v| {
            if n == name {
                v.iter_mut().for_each(|v| *v *= by);
            }
        })
    };
    for (name, by) in [
        ("loss", 1.02),
        ("metric/ce", 1.02),
        ("metric/grad_norm", 1.06),
        ("output/causal_loss", 1.02),
        ("grad/blocks.1.attn.temperature", -1.0),
        ("grad/embedding", -1.0),
        ("grad/embedding", 1.15),
        ("output/hidden", 0.0),
        ("output/hidden", 1.06),
    ] {
        assert_eq!(scaled(name, by), [name], "{name} times {by}");
    }
    // Of a file that lost its gradients nothing is left to fail.
    let mut more = right.clone();
    more.insert("grad/another".into(), vec![1.0]);
    let all = compare(&golden, &more, &rule);
    assert!(all.iter().any(|c| c.name == "grad/another" && !c.ok));
}
