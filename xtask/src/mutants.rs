//! `cargo xtask mutants`: errors that are planted in the source (`mutant!("name", right, wrong)`), switched on one at a time, and the test that must fail
//! for each. One that no test finds is a test that is missing.

use crate::root;
use By::{Engine, EngineLib, Kiln, Train, TrainLib};
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Who finds a mutant: tests of one binary, by their whole names, or a command of kiln. Seconds, so that all of them are minutes.
#[derive(Clone, Copy, PartialEq)]
enum By {
    EngineLib(&'static [&'static str]),
    Engine(&'static [&'static str]),
    TrainLib(&'static [&'static str]),
    Train(&'static [&'static str]),
    Kiln(&'static str),
}

/// Name, what is wrong, who finds it.
type Mutant = (&'static str, &'static str, By);

const PASSES: By = Engine(&["passes::every_pass_off_and_on"]);
const SUMS: By = Engine(&["graphs::sums_under_bf16_are_made_in_f32"]);
const DRAWS: By = EngineLib(&["philox::tests::a_draw_depends_on_every_part_of_its_key"]);
const ADAMW: By = EngineLib(&["ops::adamw::tests::three_steps_are_those_of_the_papers"]);
const OPTIMIZER: By = TrainLib(&["optim::tests::gradients_are_clipped_together_and_matrices_alone_decay"]);
const RESUME: By = Train(&["lifecycle::a_resumed_run_is_bit_for_bit_the_run_that_never_stopped"]);
const EVALUATION: By = Train(&["vision::evaluation_draws_nothing"]);
const POLICY: By = Train(&["polychromic::golden_with_passes_on_and_off"]);
const NUCLEUS: By = EngineLib(&["ops::sample::tests::the_nucleus_is_the_references"]);

const RANKS: By = Engine(&["ranks::a_batch_is_divided_and_the_step_stays_the_same"]);

/// Without a GPU, by the emulator.
const KERNELS: By = EngineLib(&["cuda::emulator::tests::kernels_give_the_cpus_numbers"]);

const MUTANTS: &[Mutant] = &[
    // Several ranks.
    ("a-rank-is-left-out-of-sums", "sums over ranks are those of all but the last", RANKS),
    ("gradients-of-one-rank-alone", "gradients are not summed over the ranks", RANKS),
    (
        "rows-of-other-ranks-experts",
        "a rank adds up rows of experts that it does not have",
        Engine(&["ranks::weights_are_divided_and_the_step_stays_the_same"]),
    ),
    ("fp8-scales-of-one-rank-alone", "scales of FP8 follow from the first rank's values", Engine(&["ranks::fp8_rounds_as_one_rank_does"])),
    ("every-rank-draws-the-same", "dropout of a rank's part is that of the first part", RANKS),
    // Ops, forwards and backwards.
    ("attention-hides-a-query-from-itself", "the causal mask is off by one", PASSES),
    ("attention-gradient-without-scale", "the gradient of keys lacks the scale of scores", PASSES),
    ("attention-sees-other-documents", "`until` is ignored", Train(&["polychromic::packed_examples_do_not_see_each_other"])),
    ("ssd-sees-the-future", "the mask inside a chunk is left out", PASSES),
    ("ssd-gradient-ends-with-the-chunk", "decays have no gradient from later chunks", PASSES),
    ("softmax-gradient-without-its-sum", "a term is missing", Kiln("check ops softmax")),
    ("rms-norm-eps-outside-the-root", "epsilon is added to the root", Train(&["golden::hydra_with_every_pass_setting"])),
    ("layer-norm-gradient-without-mean", "a term is missing", Kiln("check ops norm")),
    ("rope-gradient-turns-the-same-way", "a sign", Kiln("check ops rope")),
    ("matmul-forgets-its-bias", "the epilogue's bias is left out", PASSES),
    ("global-norm-gradient-forgets-dy", "a cotangent is forgotten", Kiln("check ops adamw")),
    ("reduce-leaves-out-the-last-block", "a long sum ends early", Kiln("check ops reduce")),
    (
        "maximum-gradient-not-shared",
        "each of several maxima has all of the gradient",
        Engine(&["graphs::of_equal_maxima_each_has_its_share_of_the_gradient"]),
    ),
    ("cross-entropy-counts-ignored-targets", "a target of -1 counts as class 0", Kiln("check ops cross_entropy")),
    ("linear-cross-entropy-leaves-out-class-0", "rows with target 0 count as rows without one", PASSES),
    ("dropout-not-scaled", "what is kept is not divided by 1 - p", Engine(&["graphs::dropout_of_a_constant_draws_for_every_element"])),
    ("top-k-of-a-tie-is-the-later", "which of equal numbers is taken", EngineLib(&["ops::top_k::tests::ties_go_to_the_earlier"])),
    (
        "expert-of-a-tie-is-the-later",
        "which of equal experts is taken",
        EngineLib(&["ops::experts::route::tests::of_equal_experts_the_earlier_are_chosen_first"]),
    ),
    ("top-p-keeps-one-more", "the nucleus is off by one", NUCLEUS),
    ("temperature-ignored", "logits are not divided by it", NUCLEUS),
    (
        "nf4-codes-shifted",
        "a code means its neighbour's number",
        EngineLib(&["ops::nf4::tests::a_normal_matrix_is_near_itself_and_goes_through_unchanged"]),
    ),
    ("ring-writes-one-slot-late", "the memory's slots are off by one", Train(&["lior::golden_with_passes_on_and_off"])),
    // Narrow types.
    ("embedding-gradient-summed-in-bf16", "rows of a parameter are cast before they are gathered", SUMS),
    ("sums-rounded-to-bf16", "a sum of bf16 is bf16", SUMS),
    ("gradients-of-a-weight-added-in-bf16", "what flows into a parameter is added before it is widened", SUMS),
    (
        "bf16-cut-off-instead-of-rounded",
        "towards zero, not to the nearest",
        EngineLib(&["cpu::program::tests::narrow_types_are_rounded_to_the_nearest_and_ties_to_even"]),
    ),
    (
        "fp8-weights-of-the-step-before",
        "weights are not rounded anew after an update",
        Train(&["precision::weights_are_rounded_once_a_step"]),
    ),
    // Draws.
    ("draws-ignore-the-seed", "a part of the counter is missing", DRAWS),
    ("draws-ignore-the-step", "a part of the counter is missing", DRAWS),
    ("draws-ignore-the-micro-batch", "a part of the counter is missing", DRAWS),
    ("draws-ignore-the-site", "a part of the counter is missing", DRAWS),
    (
        "micro-batches-draw-the-same",
        "the number of the micro-batch is not fed",
        Train(&["steps::micro_batches_and_steps_draw_masks_of_their_own"]),
    ),
    // Passes that apply where they must decline.
    ("fuse-norm-of-a-sum-read-before", "a guard is left out", Engine(&["passes::a_norm_adds_only_where_that_saves_something"])),
    ("blocks-share-parameters", "a guard is left out", Engine(&["graphs::mistakes_of_a_model_name_its_line_and_its_parameters"])),
    ("linear-attention-of-other-pairs", "a guard is left out", Engine(&["passes::attention_without_softmax_becomes_one_op_where_it_fits"])),
    (
        "fuse-qk-norm-drops-a-weight",
        "a guard is left out",
        Engine(&["passes::heads_are_normed_and_turned_in_one_go_only_where_nothing_is_lost"]),
    ),
    ("cse-merges-what-is-differentiated", "a guard is left out", Engine(&["graphs::a_gradient_by_a_value_is_not_that_of_its_equal"])),
    ("bf16-narrows-what-is-typed", "a guard is left out", Engine(&["passes::what_is_typed_keeps_its_types_under_bf16"])),
    (
        "gemm-epilogue-adds-a-bias-from-behind",
        "a guard is left out",
        Engine(&["graphs::a_bias_that_is_made_behind_its_product_is_added_there"]),
    ),
    ("hoist-before-its-inputs", "a guard is left out", PASSES),
    ("fuse-pointwise-through-integers", "a guard is left out", Engine(&["graphs::casts_to_integers_round_whatever_is_fused"])),
    (
        "lora-backward-before-all-is-there",
        "a guard is left out",
        EngineLib(&["passes::narrow_products::tests::pairs_are_made_together_where_all_is_there"]),
    ),
    ("merged-qkv-trained-with-frozen", "a guard is left out", Engine(&["adapters::wide_products_add_what_narrow_ones_made"])),
    ("lora-forward-of-other-rows", "a guard is left out", Engine(&["adapters::other_sums_keep_their_products"])),
    // The plan.
    ("plan-frees-a-node-early", "a buffer is free one node before its last reader", Engine(&["adapters::other_sums_keep_their_products"])),
    (
        "plan-overwrites-what-is-read-later",
        "an op writes over an input that others read",
        Engine(&["graphs::a_value_on_the_way_to_a_state_is_not_overwritten"]),
    ),
    (
        "plan-overwrites-what-is-joined",
        "an op writes over a part of something joined",
        Engine(&["graphs::what_is_joined_is_not_overwritten_by_who_reads_a_part_of_it"]),
    ),
    // The optimizer and its rate.
    ("adamw-without-bias-correction", "moments are not corrected", ADAMW),
    ("adamw-eps-inside-the-root", "epsilon is under the root", ADAMW),
    ("second-moment-becomes-zero", "a step is divided by epsilon alone", Engine(&["adam8bit::a_weight_among_larger_ones_does_not_jump"])),
    ("adamw-decays-rows-too", "norms and biases decay", OPTIMIZER),
    ("gradients-not-clipped", "the norm is computed and not used", OPTIMIZER),
    ("warmup-from-zero", "the rate of step s is that of s - 1", TrainLib(&["optim::schedule::tests::shapes"])),
    (
        "schedule-ends-with-the-steps",
        "the horizon is ignored",
        TrainLib(&["optim::schedule::tests::the_schedule_spans_the_horizon_and_not_the_steps"]),
    ),
    ("rate-of-the-next-step", "the loop feeds the rate of step + 1", Train(&["steps::every_step_has_the_rate_of_its_own_number"])),
    ("accumulation-divides-by-one-micro-batch", "1 / n is missing", Train(&["numbers::two_half_batches_are_one_batch"])),
    // Checkpoints and resuming.
    ("checksum-not-compared", "a damaged file is taken for whole", TrainLib(&["checkpoint::tests::damage_is_found_and_named"])),
    ("resume-without-state", "the optimizer's moments are not restored", RESUME),
    ("resume-skips-an-item", "the data's position is off by one", RESUME),
    (
        "resume-draws-from-the-start",
        "a resumed run counts its steps from 0",
        Train(&["polychromic::a_run_trains_saves_and_resumes_its_adapters_alone"]),
    ),
    // Data.
    ("targets-are-the-ids", "targets are not shifted", TrainLib(&["data::source::tests::token_windows_cover_the_set_once"])),
    ("validation-is-training-data", "both splits are one", TrainLib(&["data::source::tests::generated_items_are_pure_and_splits_differ"])),
    (
        "every-epoch-in-the-same-order",
        "the shuffle ignores the epoch",
        TrainLib(&["data::source::tests::orders_differ_across_seeds_and_epochs_and_are_mixed"]),
    ),
    (
        "packed-examples-see-each-other",
        "an example's tokens are seen to the row's end",
        TrainLib(&["data::replies::rows::tests::a_row_keeps_examples_apart_and_learns_replies_alone"]),
    ),
    (
        "prompts-are-learned",
        "targets of prompts count",
        TrainLib(&["data::replies::rows::tests::a_row_keeps_examples_apart_and_learns_replies_alone"]),
    ),
    (
        "documents-without-an-end",
        "the token that ends a document is not written",
        TrainLib(&["data::prepare::tests::documents_of_jsonl_are_split_by_number"]),
    ),
    // Evaluation.
    ("dropout-in-evaluation", "dropout is active", EVALUATION),
    ("augmentation-in-evaluation", "pictures are cut and mirrored", EVALUATION),
    ("evaluation-counts-what-fills-up", "the last batch's filling counts", Train(&["cli::every_validation_window_counts_once"])),
    // Recipes.
    (
        "policy-gradient-of-the-other-sign",
        "sets that differ become less likely",
        Train(&[
            "policy::a_step_makes_replies_of_sets_that_differ_much_more_likely_and_others_less",
            "policy::a_run_gets_more_diverse_and_with_the_sign_turned_less",
        ]),
    ),
    ("policy-gradient-without-baseline", "the score itself is the advantage", POLICY),
    ("policy-gradient-not-by-length", "long replies count for more", POLICY),
    ("hrm-halts-when-it-is-wrong", "the halting head's target is inverted", Train(&["hrm::golden_with_passes_on_and_off"])),
    (
        "hrm-carry-not-reset",
        "a fresh example goes on with another's thoughts",
        Train(&["hrm::an_example_that_starts_over_is_thought_about_as_if_it_were_the_first"]),
    ),
    ("hrm-thinks-a-segment-too-long", "the segment limit is off by one", Train(&["hrm::slots_are_what_a_plain_model_of_them_says"])),
    ("lior-learns-the-other-way", "the metric's sign", Train(&["lior::what_the_nudge_lengthens_becomes_cheaper"])),
    ("lior-counts-one-slot", "the ring's counter does not count the batch", Train(&["lior::without_a_nudge_nothing_is_learned_exactly"])),
    ("merged-without-alpha", "alpha / rank is missing", Train(&["models::runs_are_exported_as_adapters_and_as_models"])),
    // What checks.
    (
        "golden-files-always-pass",
        "the comparison with PyTorch cannot fail",
        Train(&["golden::one_percent_in_one_tensor_fails_by_its_name"]),
    ),
    (
        "checks-always-pass",
        "the comparison of fused and unfused ops cannot fail",
        Engine(&["ops::an_op_that_is_not_its_unfused_form_is_found"]),
    ),
    // In kernels.
    ("cuda-attention-without-scale", "scores are not scaled", KERNELS),
    ("cuda-layer-norm-without-mean", "the mean is not taken off", KERNELS),
    ("cuda-loss-without-weight", "the loss of a row is not weighted", KERNELS),
    ("cuda-expert-of-a-tie", "which of equal experts is taken", KERNELS),
    ("cuda-adamw-second-moment-not-corrected", "a correction is missing", KERNELS),
];

/// What is planted in the text of kernels must still be there; no mutant is needed to see that.
const IN_KERNELS: By = EngineLib(&["mutants::planted::tests::kernels_hold_what_is_replaced_in_them_once"]);

/// A run that takes longer hangs.
const LONGEST: Duration = Duration::from_secs(300);

/// Processes at a time: a test has threads of its own.
const AT_ONCE: usize = 2;

pub fn run(words: &[String]) -> Result<(), String> {
    let chosen: Vec<&Mutant> = MUTANTS.iter().filter(|m| words.is_empty() || words.iter().any(|w| m.0.contains(w.as_str()))).collect();
    if chosen.is_empty() {
        return Err(format!("no mutant's name holds {}", words.join(" or ")));
    }
    let built = Built::new()?;
    // Without a mutant everything must pass, or the failure of a test would say nothing.
    let mut finders = vec![IN_KERNELS];
    for m in &chosen {
        if !finders.contains(&m.2) {
            finders.push(m.2);
        }
    }
    let failed = in_parallel(&finders, |by| match built.run(by, None) {
        Ok(Ended::Passed) => None,
        Ok(Ended::Failed(test)) => Some(format!("{test} fails without a mutant")),
        Err(e) => Some(e),
    });
    if let Some(problem) = failed.into_iter().flatten().next() {
        return Err(problem);
    }
    println!("{} sets of tests pass without a mutant", finders.len());

    let line = |m: &Mutant, verdict: &str| println!("{:<42} {:<58} {verdict}", m.0, m.1);
    let ended = in_parallel(&chosen, |m| {
        let ended = built.run(&m.2, Some(m.0));
        match &ended {
            Ok(Ended::Failed(test)) => line(m, test),
            Ok(Ended::Passed) => line(m, "SURVIVED"),
            Err(_) => line(m, "no verdict"),
        }
        ended
    });
    let mut survived = vec![];
    for (m, ended) in chosen.iter().zip(ended) {
        if let Ended::Passed = ended? {
            survived.push(m.0);
        }
    }
    println!("{} found, {} survived", chosen.len() - survived.len(), survived.len());
    match survived.is_empty() {
        true => Ok(()),
        false => Err(format!("no test finds {}: write one", survived.join(", "))),
    }
}

/// How a run ended.
#[derive(Debug)]
enum Ended {
    Passed,
    /// By what: the first test or check that failed.
    Failed(String),
}

/// The binaries, with everything planted in them and nothing switched on.
struct Built {
    engine: [PathBuf; 2],
    train: [PathBuf; 2],
    kiln: PathBuf,
    target: PathBuf,
}

impl Built {
    /// In a folder of its own, so that no other build meets a planted error.
    fn new() -> Result<Built, String> {
        let target = root().join("target/mutants");
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args([
            "test",
            "--no-run",
            "--package",
            "kiln-engine",
            "--package",
            "kiln",
            "--features",
            "mutants",
            "--lib",
            "--test",
            "suite",
        ]);
        cargo.args(["--message-format", "json-render-diagnostics", "--target-dir"]).arg(&target).current_dir(root());
        println!("{cargo:?}");
        let built = cargo.stderr(Stdio::inherit()).output().map_err(|e| format!("cargo does not start: {e}"))?;
        if !built.status.success() {
            return Err("the tests were not built".into());
        }
        // A line of JSON for each, of which these parts are enough.
        let said = String::from_utf8_lossy(&built.stdout);
        let executable = |package: &str, kind: &str| {
            let (package, kind) = (format!("/{package}/Cargo.toml\""), format!("\"kind\":[\"{kind}\"]"));
            let own = said.lines().filter(|l| l.contains(&package) && l.contains(&kind));
            let path = own.filter_map(|l| l.split_once("\"executable\":\"")?.1.split('"').next()).next();
            path.map(PathBuf::from).ok_or_else(|| format!("cargo says nothing of an executable of {kind} of {package}"))
        };
        Ok(Built {
            engine: [executable("engine", "lib")?, executable("engine", "test")?],
            train: [executable("train", "lib")?, executable("train", "test")?],
            kiln: target.join("debug/kiln"),
            target,
        })
    }

    fn run(&self, by: &By, mutant: Option<&str>) -> Result<Ended, String> {
        static RUNS: AtomicUsize = AtomicUsize::new(0);
        let (binary, package) = match by {
            EngineLib(_) => (&self.engine[0], "engine"),
            Engine(_) => (&self.engine[1], "engine"),
            TrainLib(_) => (&self.train[0], "train"),
            Train(_) => (&self.train[1], "train"),
            Kiln(_) => (&self.kiln, ""),
        };
        let folder = self.target.join(format!("runs/{}", RUNS.fetch_add(1, Ordering::Relaxed)));
        let problem = |what: &str, e: std::io::Error| format!("{what} {}: {e}", folder.display());
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).map_err(|e| problem("cannot create", e))?;
        let said = File::create(folder.join("said")).map_err(|e| problem("cannot write in", e))?;
        let mut command = Command::new(binary);
        match by {
            EngineLib(tests) | Engine(tests) | TrainLib(tests) | Train(tests) => command.args(*tests).arg("--exact"),
            Kiln(args) => command.args(args.split(' ')),
        };
        // What it caches is its own: a base that was trained with an error in it must not outlive the run.
        command
            .current_dir(root().join(package))
            .env("XDG_CACHE_HOME", folder.join("cache"))
            .env("RUST_BACKTRACE", "0")
            .env_remove("KILN_MUTANT");
        command.envs(mutant.map(|name| ("KILN_MUTANT", name))).stdin(Stdio::null());
        command.stderr(said.try_clone().map_err(|e| problem("cannot write in", e))?).stdout(said);
        let mut child = command.spawn().map_err(|e| format!("{} does not start: {e}", binary.display()))?;
        let started = Instant::now();
        let status = loop {
            match child.try_wait().map_err(|e| problem("cannot wait in", e))? {
                Some(status) => break status,
                None if started.elapsed() > LONGEST => {
                    let _ = child.kill().and_then(|()| child.wait());
                    return Err(format!("{}: {command:?} hangs", mutant.unwrap_or("no mutant")));
                }
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        let said = String::from_utf8_lossy(&fs::read(folder.join("said")).map_err(|e| problem("cannot read in", e))?).into_owned();
        let _ = fs::remove_dir_all(&folder);
        let asked = match by {
            EngineLib(tests) | Engine(tests) | TrainLib(tests) | Train(tests) => Some(tests.len()),
            Kiln(_) => None,
        };
        judge(asked, status.success(), &said)
            .ok_or_else(|| format!("{}: {command:?} ended with {status} and said\n{said}", mutant.unwrap_or("no mutant")))
    }
}

/// What a run says about a mutant. None where it says nothing: a filter that matches no test, a command that could not be carried out.
fn judge(asked: Option<usize>, passed: bool, said: &str) -> Option<Ended> {
    let ran = said.lines().find_map(|l| l.strip_prefix("running ")?.split(' ').next()?.parse::<usize>().ok());
    if asked != ran {
        return None;
    }
    // "test a::b ... FAILED", "FAIL  norm: rms (gradient)   input 0: .."
    let test = |l: &str| l.strip_prefix("test ")?.strip_suffix(" ... FAILED").map(String::from);
    let check = |l: &str| l.strip_prefix("FAIL  ").and_then(|l| l.split("  ").next()).map(String::from);
    let failed: Vec<String> = said.lines().filter_map(|l| test(l).or_else(|| check(l))).collect();
    // Of several tests each must find it.
    let all = asked.is_none_or(|asked| failed.len() == asked);
    match failed.into_iter().next() {
        None if passed => Some(Ended::Passed),
        Some(by) if !passed && all => Some(Ended::Failed(by)),
        _ => None,
    }
}

/// `f` of each, a few at a time, in order.
fn in_parallel<T: Sync, R: Send>(all: &[T], f: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let (next, done) = (AtomicUsize::new(0), Mutex::new(vec![]));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some((i, item)) = Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|i| Some((i, all.get(i)?))) {
                    let result = f(item);
                    done.lock().expect("no thread panics").push((i, result));
                }
            });
        }
    });
    let mut done = done.into_inner().expect("no thread panics");
    done.sort_by_key(|d| d.0);
    done.into_iter().map(|d| d.1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// Names in the source: the first argument of each `mutant!`, and those of what is planted in kernels.
    fn planted(folder: &Path, names: &mut Vec<String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                planted(&path, names);
                continue;
            }
            if path.extension().is_none_or(|e| e != "rs") {
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            let before = if path.ends_with("engine/src/mutants.rs") { "name: " } else { "mutant!(" };
            names.extend(
                text.split(before).skip(1).filter_map(|rest| rest.trim_start().strip_prefix('"')?.split('"').next().map(String::from)),
            );
        }
    }

    #[test]
    fn every_mutant_of_the_table_is_in_the_source_once_and_no_other_is() {
        let mut names = vec![];
        ["engine/src", "train/src"].iter().for_each(|folder| planted(&root().join(folder), &mut names));
        let table: Vec<&str> = MUTANTS.iter().map(|m| m.0).collect();
        for name in names.iter().map(String::as_str).chain(table.iter().copied()) {
            let times = (names.iter().filter(|n| *n == name).count(), table.iter().filter(|n| **n == name).count());
            assert_eq!(times, (1, 1), "{name}: how often it is in the source, and in the table");
        }
    }

    #[test]
    fn a_run_that_says_nothing_is_no_verdict() {
        let judged = |asked, passed, said: &str| judge(asked, passed, said).map(|e| format!("{e:?}"));
        let failed = "running 2 tests\ntest a::b ... FAILED\ntest a::c ... FAILED\n";
        assert_eq!(judged(Some(2), false, failed).as_deref(), Some("Failed(\"a::b\")"));
        assert_eq!(judged(Some(2), false, &failed.replace("b ... FAILED", "b ... ok")), None, "only one of two finds it");
        assert_eq!(judged(Some(1), true, "running 1 test\ntest a ... ok\n").as_deref(), Some("Passed"));
        assert_eq!(judged(Some(1), true, "running 0 tests\n"), None, "the filter matches nothing");
        assert_eq!(judged(Some(1), false, "running 1 test\n"), None, "it crashed, or the test is not there");
        assert_eq!(
            judged(None, false, "ok    a: b\nFAIL  norm: rms (gradient)     input 0\n").as_deref(),
            Some("Failed(\"norm: rms (gradient)\")")
        );
        assert_eq!(judged(None, false, "error: no op is called 'nrom'\n"), None);
        assert_eq!(judged(None, true, "3 passed, 0 failed\n").as_deref(), Some("Passed"));
    }
}
