//! Runs in FP8: the warm-up, what is kept, and resuming.

use crate::common::*;
use std::path::Path;
use tempfile::tempdir;

fn small(out: &Path, args: &str) -> Ran {
    let all = "train decoder --preset tiny --device cpu --threads 1 --set model.layers=1 --set model.dim=64 --set model.hidden=128 --set model.heads=2 --set model.kv_heads=2 --set batch=2 --set eval_batches=2 --set log_every=1 --set warmup=1 --set horizon=7 --pass bf16=auto";
    let mut all: Vec<String> = all.split_whitespace().map(str::to_owned).collect();
    all.extend(["--out".into(), text(out)]);
    all.extend(args.split_whitespace().map(str::to_owned));
    kiln(all)
}

const FP8: &str = "--pass fp8=auto,least=16,warmup=4";

#[test]
fn a_run_in_fp8_resumes_to_the_bit_before_and_after_its_warm_up() {
    let dir = tempdir().unwrap();
    let (whole, parts) = (dir.path().join("whole"), dir.path().join("parts"));
    let said = small(&whole, &format!("--steps 7 {FP8}")).ok().out;
    assert!(said.contains("step 5: fp8 is active from here on, after 4 micro-batches without it"), "{said}");
    small(&parts, &format!("--steps 2 {FP8}")).ok();
    let said = resume(&parts, "--steps 5").ok().out;
    assert!(said.contains("step 5: fp8 is active"), "{said}");
    let said = resume(&parts, "--steps 7").ok().out;
    assert!(!said.contains("is active from here on"), "{said}");
    same_bytes(&checkpoint(&whole, 7), &checkpoint(&parts, 7));
    assert_eq!(losses(&whole), losses(&parts));
    // The first steps are those of a run without it, to the bit; the others are near.
    let plain = dir.path().join("plain");
    small(&plain, "--steps 7").ok();
    let (with, without) = (losses(&whole), losses(&plain));
    assert_eq!(with[..4], without[..4]);
    let (a, b) = (with[6].1.unwrap(), without[6].1.unwrap());
    assert!(a != b && (a - b).abs() < 0.01 * b, "{a} {b}");
}

#[test]
fn a_run_that_began_without_fp8_goes_on_with_it() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    small(&run, "--steps 2").ok();
    let said = resume(&run, &format!("--steps 7 {FP8}")).ok().out;
    assert!(said.contains("step 7: fp8 is active from here on, after 4 micro-batches without it"), "{said}");
    assert!(losses(&run).iter().all(|l| l.1.is_some_and(f64::is_finite)));
}

/// What begins in the middle of a step is said all the same, once.
#[test]
fn a_warm_up_that_ends_between_micro_batches_is_said() {
    let dir = tempdir().unwrap();
    let said = small(&dir.path().join("run"), &format!("--steps 4 --set accumulate=3 {FP8}")).ok().out;
    assert_eq!(said.matches("fp8 is active from here on, after 4 micro-batches without it").count(), 1, "{said}");
    let parts = dir.path().join("parts");
    small(&parts, &format!("--steps 2 --set accumulate=3 {FP8}")).ok();
    resume(&parts, "--steps 4").ok();
    same_bytes(&checkpoint(&dir.path().join("run"), 4), &checkpoint(&parts, 4));
}

/// Of several micro-batches the first rounds the weights for all, anew in every step, and nothing of that is in a checkpoint.
#[test]
fn weights_are_rounded_once_a_step() {
    let dir = tempdir().unwrap();
    let (once, each) = (dir.path().join("once"), dir.path().join("each"));
    let fp8 = "--steps 4 --set accumulate=3 --pass fp8=auto,least=16,scaling=current";
    let said = small(&once, fp8).ok().out;
    assert!(said.contains("weights are rounded once a step and kept"), "{said}");
    let said = small(&each, &format!("{fp8},weights=each")).ok().out;
    assert!(!said.contains("rounded once a step"), "{said}");
    assert_eq!(losses(&once), losses(&each));
    same_bytes(&checkpoint(&once, 4), &checkpoint(&each, 4));
    let plain = dir.path().join("plain");
    small(&plain, "--steps 4 --set accumulate=3").ok();
    assert_ne!(losses(&once), losses(&plain));
}

#[test]
fn a_resume_says_what_another_pass_or_setting_does() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    small(&run, &format!("--steps 1 {FP8}")).ok();
    resume(&run, &format!("--steps 2 {FP8},history=4")).fails(&["fp8 history=16, and this run has fp8 history=4", "--init-from"]);
    // 64 x 64 weights are below this least, 128 x 64 are not.
    let said = resume(&run, "--steps 2 --pass fp8=auto,least=40,warmup=4").ok().out;
    assert!(said.contains("fp8 applies to other tensors than in the checkpoint") && said.contains("begins anew"), "{said}");
    for (steps, change, expected) in [
        (3, "fp8=off", "differ beyond the last bits"),
        (4, "sparse-2:4=auto", "those of another model"),
        (5, "recompute=off", "may differ in the last bits"),
    ] {
        let said = resume(&run, &format!("--steps {steps} --pass {change}")).ok().out;
        let line = said.lines().find(|l| l.starts_with("passes.")).unwrap_or_default();
        assert!(line.contains(expected), "{change}: {said}");
        assert!(!said.contains("begins anew"), "{said}");
    }
}

/// The scale is so large at first that steps overflow: they are skipped and counted, the scale halves, and the run goes on; stopped in the middle and
/// resumed, it is the same to the bit.
#[test]
fn a_run_in_fp16_skips_overflows_and_resumes_to_the_bit() {
    let dir = tempdir().unwrap();
    let (whole, parts) = (dir.path().join("whole"), dir.path().join("parts"));
    let fp16 = "--pass bf16=off --pass fp16=auto,scale=16777216,interval=2";
    let said = small(&whole, &format!("--steps 7 {fp16}")).ok().out;
    // While it happens; that the last step is one of them, as after two steps, is no error as long as the scale can fall.
    assert!(
        said.contains("step 1 is skipped and changes nothing: its grad_norm is") && said.contains("; the loss scale is 8388608 now"),
        "{said}"
    );
    assert!(said.contains("fp16: the loss scale is") && said.contains("skipped"), "{said}");
    small(&parts, &format!("--steps 2 {fp16}")).ok();
    assert_eq!(records(&parts, "train").last().unwrap()["skipped"], 2.0);
    resume(&parts, "--steps 7").ok();
    same_bytes(&checkpoint(&whole, 7), &checkpoint(&parts, 7));
    let skipped = records(&whole, "train").last().unwrap()["skipped"].as_f64().unwrap();
    assert!((1.0..7.0).contains(&skipped), "{skipped} steps skipped");
}

/// `scale` is that of the first step: a run that goes on says that it keeps its own.
#[test]
fn a_resume_with_another_first_scale_says_that_the_checkpoints_counts() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    small(&run, "--steps 1 --pass bf16=off --pass fp16=auto").ok();
    let said = resume(&run, "--steps 2 --pass fp16=auto,scale=1024").ok().out;
    let line = said.lines().find(|l| l.starts_with("passes.fp16 was")).unwrap_or_default();
    assert!(line.contains("goes on from the checkpoint's") && line.contains("nothing changes") && !line.contains("differ"), "{said}");
    assert!(said.contains("fp16: the loss scale is 65536;"), "{said}");
    let said = resume(&run, "--steps 3 --pass fp16=auto,scale=2048,residual=f32").ok().out;
    let line = said.lines().find(|l| l.starts_with("passes.fp16 was")).unwrap_or_default();
    assert!(line.contains("goes on from the checkpoint's") && line.contains("differ beyond the last bits"), "{said}");
}

/// Without bf16, the receipt says what FP8 runs beside; with one micro-batch of warm-up, the line is about one.
#[test]
fn fp8_beside_f32_says_so() {
    let dir = tempdir().unwrap();
    let warm = "--steps 2 --pass fp8=auto,least=16,warmup=1";
    let said = small(&dir.path().join("f32"), &format!("{warm} --pass bf16=off")).ok().out;
    assert!(said.contains("everything else is in f32: --pass bf16=auto goes with it"), "{said}");
    assert!(said.contains("is active from here on, after 1 micro-batch without it"), "{said}");
    let said = small(&dir.path().join("bf16"), warm).ok().out;
    assert!(!said.contains("everything else is in f32"), "{said}");
}
