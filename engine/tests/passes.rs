//! Every pass against itself switched off; receipts, modes, and the errors of bad settings.

use engine::passes::{Mode, Target, all_applied};
use engine::{Cpu, DType, Device, Error, Init, PASSES, Recorder, Switches, check};

#[test]
fn every_pass_off_and_on() {
    let problems: Vec<String> = PASSES
        .iter()
        .filter_map(|p| Some(format!("{}: {}", p.name(), check::check_pass(*p, &Device::cpu(Cpu::new(2))).problem?)))
        .collect();
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn settings_that_are_wrong_are_named() {
    let error = |pass: &str, value: &str| Switches::default().set(pass, value).unwrap_err().to_string();
    assert!(error("fuse-pointwize", "auto").contains("did you mean 'fuse-pointwise'"));
    assert!(error("recompute", "maybe").contains("'maybe' is not off, auto or require"));
    assert!(error("linear-ce", "auto,chonk=3").contains("it has: chunk"));
    assert!(error("in-place", "auto,chunk").contains("is not setting=value"));
}

#[test]
fn require_turns_a_declined_site_into_an_error() {
    let graph = || {
        let r = Recorder::new();
        let w = r.param("w", &[4], Init::Full(1.0));
        let loss = w.square().sum();
        r.output("dw", r.grad(loss, &[w])[0]);
        r.finish()
    };
    let switches = |v: &str| Switches::default().with("recompute", v).unwrap();
    let c = engine::Compiled::new(graph(), &switches("auto"), Target::Cpu).unwrap();
    let receipt = c.receipts.iter().find(|r| r.pass == "recompute").unwrap();
    assert_eq!((receipt.mode, receipt.applied, receipt.sites()), (Mode::Auto, 0, 1));
    assert!(matches!(engine::Compiled::new(graph(), &switches("require"), Target::Cpu).err(), Some(Error::Declined { .. })));
    // nothing to apply to at all
    let flash = Switches::default().with("flash-attention", "require").unwrap();
    let c = engine::Compiled::new(graph(), &flash, Target::Cpu).unwrap();
    assert!(matches!(all_applied(std::iter::once(&c.receipts[..])), Err(Error::NoSites(p)) if p == "flash-attention"));
}

#[test]
fn an_unreached_parameter_is_an_error_by_name() {
    let r = Recorder::new();
    let (a, b) = (r.param("used", &[2], Init::Full(1.0)), r.param("forgotten", &[2], Init::Full(1.0)));
    let loss = a.sum();
    r.output("g", r.grad(loss, &[a, b])[1]);
    let e = engine::Compiled::new(r.finish(), &Switches::default(), Target::Cpu).err().unwrap();
    assert!(e.to_string().contains("'forgotten'"), "{e}");
}

#[test]
#[should_panic(expected = "matmul of f32[2, 3] and f32[4, 5]")]
fn shapes_that_do_not_fit_panic_where_they_are_recorded() {
    let r = Recorder::new();
    let x = r.feed("x", &[2, 3], DType::F32);
    x.matmul(r.feed("y", &[4, 5], DType::F32));
}
