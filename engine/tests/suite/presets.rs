//! Presets of switches by their numerics, and fallbacks of the GPU executor.

use kiln_engine::ops::adamw::{AdamW, momentum};
use kiln_engine::passes::{Mode, Numerics, Preset, Receipt, Switch, Target, all};
use kiln_engine::program::imagined;
use kiln_engine::{Compiled, DType, Init, Recorder, Switches};

fn switch(name: &str) -> &'static dyn Switch {
    all().find(|s| s.name() == name).unwrap()
}

fn mode(switches: &Switches, name: &str, target: Target) -> Mode {
    switches.mode(switch(name), target)
}

/// A linear layer that is worth FP8, trained.
fn receipts(switches: &Switches, target: Target) -> Vec<Receipt> {
    let r = Recorder::new();
    let w = r.param("w", &[512, 512], Init::Normal { std: 0.1 });
    let loss = r.feed("x", &[256, 512], DType::F32).linear(w).square().mean();
    r.output("loss", loss);
    r.output("dw", r.grad(loss, &[w])[0]);
    Compiled::new(r.finish(), switches, target).unwrap().receipts
}

fn of<'a>(receipts: &'a [Receipt], name: &str) -> &'a Receipt {
    receipts.iter().find(|r| r.pass == name).unwrap()
}

#[test]
fn none_switches_off_what_can_be_off_and_code_begins_with_the_switches_own_defaults() {
    for target in [Target::Cpu, imagined(90)] {
        for s in all() {
            let none = Switches::of(Preset::None).mode(s, target);
            assert_eq!(none == Mode::Off, !s.required(), "{}", s.name());
            assert_eq!(Switches::default().mode(s, target), s.default_mode(), "{}", s.name());
        }
    }
    assert_eq!(Switches::default().preset, Preset::Plain);
}

/// [bf16, fp16, tf32, fp8] of a GPU and of the CPU.
#[test]
fn each_preset_has_its_precision() {
    let precision = |s: &Switches| [imagined(90), Target::Cpu].map(|t| ["bf16", "fp16", "tf32", "fp8"].map(|p| mode(s, p, t) != Mode::Off));
    let f32 = [false; 4];
    let of = |preset: Preset| precision(&Switches::of(preset));
    for preset in [Preset::None, Preset::Exact, Preset::Plain] {
        assert_eq!(of(preset), [f32; 2], "{preset:?}");
    }
    assert_eq!(of(Preset::Reordered), [[false, false, true, false], f32]);
    assert_eq!(of(Preset::Mixed), [[true, false, false, false], f32]);
    assert_eq!(of(Preset::Fast), [[true, false, true, true], f32]);
    // A word on precision is above the default: fp16, TF32, or no bf16.
    let mixed = |pass: &str, value: &str| precision(&Switches::of(Preset::Mixed).with(pass, value).unwrap())[0];
    assert_eq!(mixed("fp16", "auto"), [false, true, false, false]);
    assert_eq!(mixed("tf32", "auto"), [false, false, true, false]);
    assert_eq!(mixed("bf16", "off"), f32);
    assert_eq!(mixed("tf32", "off"), [true, false, false, false]);
    assert!(Preset::Mixed.allows(Numerics::LowPrecision) && !Preset::Reordered.allows(Numerics::LowPrecision));
    assert!(Preset::Reordered.allows(Numerics::Reordered) && !Preset::Exact.allows(Numerics::Reordered));
}

#[test]
fn exact_follows_from_the_numerics_in_the_types_of_the_run() {
    let exact = Switches::of(Preset::Exact);
    for target in [Target::Cpu, imagined(90)] {
        for s in all().filter(|s| !s.required() && s.default_mode() == Mode::Auto) {
            let is = s.numerics(target, DType::F32) == Numerics::Exact;
            assert_eq!(exact.mode(s, target) == Mode::Auto, is, "{} on {target:?}", s.name());
        }
    }
    assert_eq!((mode(&exact, "in-place", Target::Cpu), mode(&exact, "flash-attention", Target::Cpu)), (Mode::Auto, Mode::Off));
    assert_eq!((mode(&exact, "fuse-pointwise", Target::Cpu), mode(&exact, "fuse-pointwise", imagined(90))), (Mode::Auto, Mode::Off));
    // What is exact in f32 may not be so in bf16.
    assert_eq!(mode(&exact, "recompute", Target::Cpu), Mode::Auto);
    for narrow in ["bf16", "fp16"] {
        let narrow = exact.clone().with(narrow, "auto").unwrap();
        assert_eq!((mode(&narrow, "recompute", Target::Cpu), mode(&narrow, "in-place", Target::Cpu)), (Mode::Off, Mode::Auto));
    }
}

#[test]
fn what_is_set_by_name_is_above_a_preset() {
    for preset in Preset::ALL {
        let s = Switches::of(preset).with("flash-attention", "require").unwrap().with("in-place", "off").unwrap();
        assert_eq!((mode(&s, "flash-attention", Target::Cpu), mode(&s, "in-place", Target::Cpu)), (Mode::Require, Mode::Off));
        assert_eq!(Preset::named(preset.name()).unwrap(), preset);
    }
    let off = Switches::of(Preset::Fast).with("fp8", "off").unwrap();
    assert_eq!((mode(&off, "fp8", imagined(90)), mode(&off, "bf16", imagined(90))), (Mode::Off, Mode::Auto));
    // bf16 and fp16 cannot both be: the one that was asked for is.
    let fp16 = Switches::of(Preset::Fast).with("fp16", "auto").unwrap();
    assert_eq!([mode(&fp16, "bf16", imagined(90)), mode(&fp16, "fp8", imagined(90))], [Mode::Off; 2]);
    assert!(of(&receipts(&fp16, imagined(90)), "fp16").applied > 0);
}

#[test]
fn fast_rounds_where_the_gpu_can_and_says_where_it_cannot() {
    let fast = Switches::of(Preset::Fast);
    let new = receipts(&fast, imagined(90));
    assert!(of(&new, "bf16").applied > 0 && of(&new, "fp8").applied > 0, "{new:?}");
    assert_eq!(mode(&fast, "tf32", imagined(90)), Mode::Auto);
    for slower in ["adam8bit", "fp16", "offload"] {
        assert_eq!(mode(&fast, slower, imagined(90)), Mode::Off, "{slower}");
    }
    let old = receipts(&fast, imagined(80));
    assert!(of(&old, "bf16").applied > 0 && of(&old, "fp8").mode == Mode::Off, "{old:?}");
    let why = of(&old, "fp8").summary();
    assert!(why.contains("optimize=fast") && why.contains("8.9") && why.contains("8.0"), "{why}");
    let cpu = receipts(&fast, Target::Cpu);
    assert!(["bf16", "fp8"].iter().all(|s| of(&cpu, s).mode == Mode::Off && of(&cpu, s).summary().contains("gains nothing")), "{cpu:?}");
}

#[test]
fn an_unknown_preset_is_refused_with_the_known_ones() {
    let said = Preset::named("fastt").unwrap_err().to_string();
    assert!(said.contains("did you mean 'fast'?") && Preset::ALL.iter().all(|p| said.contains(p.name())), "{said}");
}

/// Off, a program has the kernels for any GPU; on, those of this one; and what has one kernel for all is no site.
#[test]
fn native_kernels_are_those_of_the_gpu() {
    let native = switch("native-kernels");
    let compiled = |mode: &str, sm: u32| {
        let r = Recorder::new();
        native.example(&r);
        let c = Compiled::new(r.finish(), &Switches::default().with("native-kernels", mode).unwrap(), imagined(sm)).unwrap();
        let receipt = of(&c.receipts, "native-kernels").clone();
        (receipt.applied, c.plan.memory)
    };
    assert!(compiled("auto", 90).0 > 0 && compiled("auto", 80).0 > 0 && compiled("require", 90).0 > 0);
    assert_eq!(compiled("off", 90).0, 0);
    let plain = receipts(&Switches::default(), imagined(90));
    assert_eq!(of(&plain, "native-kernels").sites(), 0, "f32 GEMMs by cuBLASLt and arithmetic");
}

/// AdamW's moments go to host memory; Muon's momentum stays, and the receipt says why. What is no optimizer's state is no site: here a sum that is
/// carried on, and a gradient that is added up over micro-batches.
#[test]
fn offload_says_what_it_leaves() {
    let compiled = |shape: [usize; 2], muon: bool, offload: &str| {
        let r = Recorder::new();
        let state = |name: &str| r.state(name, &shape, DType::F32, Init::Full(0.0));
        let (w, x) = (r.param("w", &shape, Init::Normal { std: 1.0 }), r.feed("x", &shape, DType::F32));
        let (carry, sum) = (state("carry"), state("gradient"));
        r.update(carry, carry * 0.5 + x);
        r.update(sum, sum * 0.0);
        let one = r.full(&[1], 1.0);
        if muon {
            let kept = state("momentum");
            let [u, next] = momentum(0.9, one, one, sum, kept);
            [(kept, next), (w, w - u)].into_iter().for_each(|(state, next)| r.update(state, next));
        } else {
            let states = [w, state("m"), state("v")];
            let inputs = [one, one, one, one, w, sum, states[1], states[2]];
            let after = r.op(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay: vec![0.1] }, &inputs);
            states.into_iter().zip(after).for_each(|(state, next)| r.update(state, next));
        }
        let switches = Switches::default().with("offload", offload).unwrap();
        Compiled::new(r.finish(), &switches, imagined(90)).map(|c| of(&c.receipts, "offload").clone())
    };
    let said = compiled([512, 1024], false, "require").unwrap();
    assert!(said.applied == 2 && said.declined.is_empty() && said.summary().contains("4 MiB of states"), "{said:?}");
    let said = compiled([512, 1024], true, "auto").unwrap();
    assert!(said.applied == 0 && said.declined.len() == 1 && said.declined[0].1 == "momentum", "{said:?}");
    assert!(said.summary().contains("other kernels"), "{}", said.summary());
    let said = compiled([16, 16], false, "auto").unwrap();
    let sites: Vec<&str> = said.declined.iter().map(|d| d.1.as_str()).collect();
    assert!(said.applied == 0 && sites == ["m", "v"] && said.summary().contains("less than 1 MiB"), "{said:?}");
}
