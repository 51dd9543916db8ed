//! `kiln check defaults`: no pass that is on by default makes a step slower.

use crate::common::kiln;

/// The smallest presets, with fewer examples a step: by CPU time, so that other processes hardly matter.
#[test]
fn no_pass_that_is_on_costs_a_tenth_of_a_step() {
    for args in [
        "decoder --set train.batch=2",
        "hydra --set train.batch=2",
        "vision_bdh",
        "hrm",
        "hrm_lm --set train.batch=16",
        "lior --set train.batch=2",
        "polychromic --set objective.prompts=2 --set objective.new_tokens=16 --set train.batch=2",
    ] {
        let ran = kiln(format!("check defaults {args} --device cpu --threads 1").split(' ')).ok();
        assert!(ran.out.contains("no pass that is on by default costs more than 10% of a step's time"), "{}", ran.out);
        // Each was timed: every recipe computes something that is fused, and reuses memory.
        let timed = |pass: &str| ran.out.lines().any(|l| l.contains(pass) && l.contains("% to "));
        assert!(timed("fuse-pointwise") && timed("in-place") && !ran.out.contains("not timed"), "{}", ran.out);
    }
}

#[test]
fn what_is_named_wrongly_is_refused() {
    for (args, said) in [
        ("nothing", "there is no recipe 'nothing'"),
        ("hrm --preset nothing", "there is no preset 'nothing'"),
        ("hrm --only nothing", "nothing"),
        ("hrm --set train.batch=0", "train.batch"),
    ] {
        let ran = kiln(format!("check defaults {args} --device cpu").split(' '));
        assert!(ran.code == Some(1) && ran.err.contains(said) && !ran.panicked(), "{args}: {}", ran.err);
    }
}
