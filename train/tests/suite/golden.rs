//! kiln against the numbers that plain PyTorch computed.

use engine::{Cpu, Device, Switches};
use std::path::PathBuf;
use train::golden::{Golden, Rule, compare};
use train::recipe;

fn file() -> Golden {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../reference/golden/hydra.safetensors");
    Golden::open(&path).unwrap()
}

fn computed(file: &Golden, switches: &Switches) -> recipe::Computed {
    recipe::find(&file.recipe).unwrap().golden(file, switches, &Device::cpu(Cpu::new(2))).unwrap()
}

#[test]
fn hydra_with_every_pass_setting() {
    let settings: [&[(&str, &str)]; 4] = [
        &[],
        &[("recompute", "require,what=blocks")],
        &[("recompute", "require,what=memory-bound"), ("linear-ce", "require,chunk=7")],
        &[
            ("flash-attention", "off"),
            ("linear-ce", "off"),
            ("fuse-norm", "off"),
            ("fuse-qk-norm", "off"),
            ("fuse-routing", "off"),
            ("dead-code", "off"),
            ("fuse-pointwise", "off"),
            ("in-place", "off"),
        ],
    ];
    let golden = file();
    for setting in settings {
        let mut switches = Switches::default();
        setting.iter().for_each(|(name, value)| switches.set(name, value).unwrap());
        let all = compare(&golden, &computed(&golden, &switches), Rule::Tolerance(1e-5));
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
        let all = compare(&golden, &computed(&golden, &switches), Rule::Cosine(0.99));
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
        let failed: Vec<String> = compare(&golden, &wrong, Rule::Tolerance(1e-4)).into_iter().filter(|c| !c.ok).map(|c| c.name).collect();
        assert_eq!(failed, [name]);
    }
    let mut missing = right.clone();
    missing.remove("grad/norm");
    assert!(compare(&golden, &missing, Rule::Tolerance(1e-4)).iter().any(|c| c.name == "grad/norm" && !c.ok));
    let mut broken = right;
    broken.get_mut("loss").unwrap()[1] = f32::NAN;
    assert!(compare(&golden, &broken, Rule::Tolerance(1e-4)).iter().any(|c| c.name == "loss" && !c.ok));
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
        ("epilogue", "off"),
        ("bf16", "auto"),
        ("bf16", "auto,residual=f32"),
    ];
    for setting in settings {
        let switches = Switches::default().with(setting.0, setting.1).unwrap();
        let device = Device::cpu(Cpu::new(2));
        let computed = train::recipe::find("vision_bdh").unwrap().golden(&golden, &switches, &device).unwrap();
        let rule = if setting.0 == "bf16" { Rule::Cosine(0.99) } else { Rule::Tolerance(1e-5) };
        let all = compare(&golden, &computed, rule);
        assert_eq!(all.len(), 2 * 9 + 4);
        let bad: Vec<String> = all.iter().filter(|c| !c.ok).map(|c| format!("{} off by {:.2e}", c.name, c.error)).collect();
        assert!(bad.is_empty(), "{setting:?}: {bad:?}");
    }
}
