//! Every planted error, and who finds it.

use super::By::{self, Engine, EngineLib, Kiln, Train, TrainLib};
use super::Mutant;

const PASSES: By = Engine(&["passes::every_pass_off_and_on"]);
const SUMS: By = Engine(&["graphs::sums_under_bf16_are_made_in_f32"]);
const DRAWS: By = EngineLib(&["philox::tests::a_draw_depends_on_every_part_of_its_key"]);
const ADAMW: By = EngineLib(&["ops::adamw::tests::three_steps_are_those_of_the_papers"]);
const OPTIMIZER: By = TrainLib(&["optim::tests::gradients_are_clipped_together_and_matrices_alone_decay"]);
const RESUME: By = Train(&["lifecycle::a_resumed_run_is_bit_for_bit_the_run_that_never_stopped"]);
const MADE_UP: By = Train(&["ends::an_evaluation_that_a_signal_stopped_is_made_up_for_to_the_last_bit"]);
const AS_GOOD: &str = "run::best::tests::what_is_as_good_as_the_best_is_no_better";
const EVALUATION: By = Train(&["vision::evaluation_draws_nothing"]);
const POLICY: By = Train(&["polychromic::golden_with_passes_on_and_off"]);
const NUCLEUS: By = EngineLib(&["ops::sample::tests::the_nucleus_is_the_references"]);

const RANKS: By = Engine(&["ranks::a_batch_is_divided_and_the_step_stays_the_same"]);

const FP16: By = Engine(&["fp16::the_scale_stays_within_bounds"]);

const INITIAL: By = EngineLib(&["store::tests::initial_values_follow_their_distributions"]);

/// What is on the disk, by the calls that were made.
const FILES: By = TrainLib(&["files::tests::what_appears_is_on_the_disk_before_anything_else_goes"]);
const CHECKPOINTS: By = TrainLib(&["checkpoint::tests::a_checkpoint_is_on_the_disk_before_older_ones_go"]);
const RECORDS: By = TrainLib(&["metrics::tests::records_are_on_the_disk_when_they_are_said_to_be"]);
const TABLES: By = TrainLib(&["run::tests::tables_of_all_programs_are_planned_and_the_largest_feeds"]);

/// Without a GPU, by the emulator.
const KERNELS: By = EngineLib(&["cuda::emulator::tests::kernels_give_the_cpus_numbers"]);

pub const MUTANTS: &[Mutant] = &[
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
    (
        "overflow-of-one-rank-alone",
        "each rank scales fp16 by its own overflows",
        Engine(&["micro_batches::an_overflow_in_the_rows_of_one_rank_is_one_of_all"]),
    ),
    (
        "a-sum-that-is-put-out-is-emptied",
        "a sum lies in the state that becomes zeros, and is read after the run",
        Engine(&["micro_batches::a_sum_that_is_put_out_is_not_emptied"]),
    ),
    // Ops, forwards and backwards.
    ("attention-hides-a-query-from-itself", "the causal mask is off by one", PASSES),
    (
        "slow-gelu-epilogue",
        "the CPU's epilogue calls the library's tanh for each number",
        Kiln("check defaults lior --set train.batch=2 --only gemm-epilogue --device cpu --threads 1"),
    ),
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
    ("nf4-zeros-become-small", "a block of zeros has codes of its rounded scale", EngineLib(&["ops::nf4::tests::zeros_stay_zeros"])),
    (
        "log-prob-at-the-drawing-temperature",
        "the model's log probability depends on how tokens are drawn",
        EngineLib(&["ops::sample::tests::log_probabilities_are_of_all_tokens_at_temperature_1"]),
    ),
    (
        "mamba2-remembers-padding",
        "before a short prompt the convolution sees what fills up the row",
        Train(&["mamba2::padding_before_a_short_prompt_is_not_remembered"]),
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
    ("fp16-scale-falls-below-1", "what overflows again and again loses all that is small", FP16),
    ("fp16-scale-without-an-upper-bound", "a scale doubles for ever", FP16),
    ("fp8-history-ignored", "scales follow from this step alone", Engine(&["fp8::scales_remember_a_large_step_and_then_forget_it"])),
    ("fp8-scale-of-zeros", "zeros have the smallest scale there is", Engine(&["fp8::a_step_of_zeros_leaves_the_scales_alone"])),
    // Initial values.
    ("truncated-is-cut-off", "what is outside becomes the edge", INITIAL),
    ("uniform-on-one-side", "nothing is below 0", INITIAL),
    ("uniform-without-logarithm", "the number, and not its logarithm", INITIAL),
    ("step-size-without-softplus", "the inverse of softplus is left out", INITIAL),
    ("states-start-alike", "draws ignore the name", EngineLib(&["store::tests::states_of_other_names_and_seeds_start_elsewhere"])),
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
        "a matmul adds a bias that is not there yet",
        Engine(&["graphs::a_bias_is_there_before_its_matmul"]),
    ),
    (
        "capacity-of-a-tie-is-the-later",
        "which of equal tokens has an expert's last place",
        EngineLib(&["ops::experts::capacity::tests::the_largest_weights_have_places_and_of_equal_ones_the_earlier"]),
    ),
    (
        "capacity-of-one-more",
        "an expert takes a token more than it has places",
        EngineLib(&["ops::experts::capacity::tests::the_largest_weights_have_places_and_of_equal_ones_the_earlier"]),
    ),
    (
        "fuse-decode-of-a-state-that-changes",
        "a kernel asks early for a weight that is still being written",
        Engine(&["decode::a_state_is_a_weight_only_where_it_stays_as_it_is"]),
    ),
    (
        "hoist-before-its-inputs",
        "a gradient moves before what it is made of",
        EngineLib(&["passes::hoist::tests::a_gradient_does_not_move_before_what_it_is_made_of"]),
    ),
    (
        "hoist-keeps-what-is-large",
        "a large gradient is made early and kept until the end",
        EngineLib(&["passes::hoist::tests::a_gradient_moves_into_the_forward_pass_where_it_is_small"]),
    ),
    ("fuse-pointwise-through-integers", "a guard is left out", Engine(&["graphs::casts_to_integers_round_whatever_is_fused"])),
    (
        "lora-backward-before-all-is-there",
        "a guard is left out",
        EngineLib(&["passes::lora_backward::tests::pairs_are_made_together_where_all_is_there"]),
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
    (
        "plan-joins-what-is-not-aligned",
        "a part begins anywhere",
        Engine(&["graphs::parts_that_are_computed_where_they_are_joined_are_aligned"]),
    ),
    ("peak-without-feeds", "a batch takes no memory", Engine(&["graphs::the_peak_of_memory_is_the_sum_of_its_parts"])),
    ("tables-of-one-program-alone", "the largest program's tables count, and not all", TABLES),
    ("feeds-of-all-programs", "batches of programs that run one after another are added up", TABLES),
    (
        "recomputation-counts-as-work",
        "a run's share of the peak has what is computed twice",
        TrainLib(&["run::tests::what_is_computed_twice_is_not_counted_as_work"]),
    ),
    (
        "work-of-one-micro-batch",
        "tokens a second are those of one micro-batch a step",
        Train(&["steps::the_work_of_a_step_is_that_of_all_its_micro_batches"]),
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
    // What is on the disk after a power cut.
    ("a-file-is-not-synced", "a file has its name before its bytes", FILES),
    ("the-name-of-a-file-is-not-synced", "a file is said to be written before it has its name", FILES),
    ("a-link-is-not-synced", "the name of a link", FILES),
    ("a-new-file-is-not-synced", "a file in a folder that nobody reads yet", FILES),
    ("a-new-folder-is-not-synced", "the name of a new folder", FILES),
    ("files-of-a-folder-are-not-synced", "a folder appears before its files' bytes", FILES),
    ("names-in-a-folder-are-not-synced", "a folder appears before the names in it", FILES),
    ("the-name-of-a-folder-is-not-synced", "what is replaced goes before its successor has its name", FILES),
    ("tensors-are-not-synced", "a checkpoint appears before its tensors' bytes", CHECKPOINTS),
    ("names-in-a-checkpoint-are-not-synced", "a checkpoint appears before the names in it", CHECKPOINTS),
    ("the-name-of-a-checkpoint-is-not-synced", "older checkpoints go before the new one has its name", CHECKPOINTS),
    ("the-name-of-checkpoints-is-not-synced", "the folder of checkpoints has no name yet", CHECKPOINTS),
    (
        "shards-are-not-synced",
        "a shard has its name before its bytes",
        TrainLib(&["data::shards::tests::a_shard_is_on_the_disk_before_it_has_its_name"]),
    ),
    ("names-of-records-are-not-synced", "the names of metrics.jsonl and TensorBoard's file", RECORDS),
    ("records-are-not-synced", "records are said to be on the disk", RECORDS),
    (
        "a-checkpoint-without-its-records",
        "a checkpoint is saved before the records up to its step",
        TrainLib(&["run::tests::checkpoints_and_what_was_recorded_before_them_are_on_the_disk_before_older_ones_go"]),
    ),
    // How runs end.
    (
        "averages-stay-after-a-stop",
        "a stop in an evaluation leaves the averaged weights in the place of the others",
        Train(&[
            "ends::averages_and_weights_are_not_exchanged_by_a_stop_in_a_validation",
            "ends::an_evaluation_that_a_signal_stopped_is_made_up_for_to_the_last_bit",
        ]),
    ),
    ("nan-is-the-best", "a first evaluation of NaN is the best for ever", TrainLib(&["run::best::tests::nan_is_never_the_best"])),
    (
        "infinity-is-the-best",
        "a first evaluation that overflows is the best for ever",
        TrainLib(&["run::best::tests::nan_is_never_the_best"]),
    ),
    (
        "waiting-for-a-first-number-is-not-noted",
        "a resumed run counts evaluations without a number from 0",
        Train(&["best::waiting_for_a_first_number_goes_on_when_a_run_is_resumed"]),
    ),
    (
        "every-step-after-the-best-is-saved",
        "the steps between the best evaluation and the next are saved, too",
        Train(&["best::only_the_step_of_the_best_evaluation_is_saved"]),
    ),
    ("a-tie-is-better", "an equal loss is an improvement", TrainLib(&[AS_GOOD])),
    ("a-tie-of-shares-is-better", "an equal share is an improvement", TrainLib(&[AS_GOOD])),
    (
        "other-validation-data",
        "a run goes on with other validation data",
        Train(&["ends::other_validation_data_is_refused_when_a_run_goes_on"]),
    ),
    (
        "validation-of-an-earlier-step",
        "a late report of an earlier step is recorded with this one's evaluation",
        Train(&["ends::a_report_that_comes_late_has_no_part_in_a_later_evaluation"]),
    ),
    ("evaluation-is-lost", "what a signal stopped is not made up for", MADE_UP),
    ("an-epoch-counts-a-step-twice", "the step whose evaluation is made up for is in its epoch's mean already", MADE_UP),
    ("figures-are-forgotten", "a resumed run notes nothing of the last validation until the next", MADE_UP),
    ("made-up-for-and-not-saved", "a checkpoint still lacks the evaluation that was made up for", MADE_UP),
    ("waiting-begins-anew", "a resumed run counts evaluations without an improvement from 0", MADE_UP),
    (
        "nan-at-the-end-is-a-success",
        "a run that ends with skipped steps finishes",
        Train(&["ends::a_run_that_ends_with_skipped_steps_is_no_success", "ends::numbers_that_are_not_finite_are_shown_and_fail"]),
    ),
    (
        "nan-of-validation-is-a-success",
        "a run whose last validation is NaN finishes",
        Train(&["ends::a_run_whose_last_validation_is_not_finite_is_no_success"]),
    ),
    (
        "skipped-steps-push-checkpoints-out",
        "a checkpoint of skipped steps takes the place of a good one",
        Train(&["ends::a_run_that_ends_with_skipped_steps_is_no_success"]),
    ),
    ("weights-of-nan-are-saved", "weights are not looked at", Train(&["ends::weights_that_are_not_finite_are_not_saved"])),
    (
        "weights-of-nan-are-read",
        "weights of a folder or of adapters are not looked at",
        Train(&["broken_weights::weights_that_are_not_finite_are_refused_by_name_wherever_they_are_read"]),
    ),
    (
        "checkpoints-of-nan-are-read",
        "a checkpoint's weights are not looked at",
        Train(&[
            "ends::a_checkpoint_whose_weights_are_not_finite_is_refused_by_name",
            "lifecycle::weights_to_start_from_that_are_not_finite_are_refused_by_name",
        ]),
    ),
    (
        "infinity-is-finite",
        "only NaN is looked for",
        TrainLib(&["finite::tests::the_first_number_that_is_not_finite_is_found_wherever_it_is"]),
    ),
    (
        "a-hangup-is-a-failure",
        "ranks that had not yet caught a signal are taken for lost",
        TrainLib(&["launch::local::tests::how_ranks_ended_is_told_from_what_mpiexec_says_and_does_not_say"]),
    ),
    (
        "elastic-gives-up-before-ranks-are-connected",
        "mpiexec that fails itself is taken for a rank with an error of its own",
        TrainLib(&["launch::local::tests::how_ranks_ended_is_told_from_what_mpiexec_says_and_does_not_say"]),
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
    ("further-ends-do-not-end", "of several ends one ends a reply", Train(&["models::a_reply_ends_with_any_end_that_the_folder_names"])),
    ("fine-tuned-weights-in-f32", "a base of 16 bits comes out twice as large", Train(&["exports::a_base_is_exported_in_its_own_type"])),
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
    ("cuda-sum-of-a-row-too-many", "a rank adds a row of the next rank's experts", KERNELS),
    ("cuda-gradient-of-a-row-too-many", "a rank has a gradient for a row of the next rank's experts", KERNELS),
    ("cuda-fp8-history-ignored", "scales follow from this step alone", KERNELS),
    ("cuda-fp8-oldest-counts", "what drops out of the history still counts", KERNELS),
    ("cuda-fp8-scale-of-zeros", "zeros have the smallest scale there is", KERNELS),
    ("cuda-adamw-second-moment-not-corrected", "a correction is missing", KERNELS),
];
