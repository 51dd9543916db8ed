//! Errors that only a special case shows: a window, another seed, another set, a clock, several ranks.

use super::By::{Engine, EngineLib, Train, TrainLib};
use super::{By, Mutant};

const GGUF_HEADER: By = TrainLib(&["models::gguf::tests::the_header_says_all_that_the_architecture_is"]);
const REPLIES: By = Train(&["policy::a_reply_is_what_whole_rows_would_draw"]);
const STEPS_WITH_REPLIES: By = Train(&["policy::every_step_with_replies_has_prompts_and_draws_of_its_own"]);
const DRAWN_REPLIES: By = Train(&["newcomer::replies_are_drawn_by_the_seed_and_anew_in_every_batch"]);
const SURVEY: By = TrainLib(&["recipes::polychromic::policy::tests::a_survey_says_what_its_sets_are_like"]);
const TUNED: By = Train(&["base::a_step_has_as_many_examples_however_it_is_computed"]);
const GGUF_LLAMA3: By = TrainLib(&["models::gguf::tests::llama3_divides_low_frequencies"]);
const ENCODER: By = Train(&["encoder::letters_are_lowered_where_the_folder_says_so"]);
const PUZZLES: By = TrainLib(&["recipes::hrm::puzzles::tests::every_epoch_has_all_puzzles_in_an_order_and_forms_of_its_own"]);
const PICTURES: By = Train(&["vision::pictures_are_cut_and_mirrored_only_where_that_is_asked_for"]);
const TENSOR_CORES: By = TrainLib(&["profile::digest::tests::tensor_cores_are_used_for_as_long_as_their_nodes_run"]);

pub const MUTANTS: &[Mutant] = &[
    ("gguf-key-heads-are-heads", "a header says as many heads of keys as of queries", GGUF_HEADER),
    ("gguf-without-rope-base", "a header lacks a key", GGUF_HEADER),
    ("gguf-bf16-by-another-number", "ggml's number of a type", TrainLib(&["models::gguf::tests::types_have_ggmls_numbers"])),
    ("gguf-q8-says-it-is-q4", "ggml's number of a kind of file", TrainLib(&["models::gguf::tests::types_have_ggmls_numbers"])),
    ("gguf-bf16-cut-off", "towards zero, not to the nearest", TrainLib(&["models::gguf::tests::bf16_is_rounded_to_the_nearest"])),
    ("prompts-without-the-window", "prompts are read as if attention had no window", REPLIES),
    ("replies-without-the-window", "replies are written as if attention had no window", REPLIES),
    (
        "packed-rows-without-the-window",
        "examples in a row are seen as if attention had no window",
        Train(&["polychromic::packed_examples_do_not_see_each_other"]),
    ),
    ("every-step-asks-the-same", "replies are written to the first prompts in every step", STEPS_WITH_REPLIES),
    ("every-step-draws-the-same-replies", "draws of replies ignore the step", STEPS_WITH_REPLIES),
    (
        "every-token-draws-the-same",
        "draws ignore the token's place",
        TrainLib(&["sample::tests::every_token_of_a_text_has_a_draw_of_its_own"]),
    ),
    ("replies-ignore-the-seed", "`--seed` changes nothing", DRAWN_REPLIES),
    ("batches-draw-the-same", "each batch of prompts has the first one's draws", DRAWN_REPLIES),
    (
        "other-validation-pictures",
        "the pictures to validate with are not told apart",
        Train(&["vision::another_picture_to_validate_with_or_to_learn_from_is_refused"]),
    ),
    (
        "other-classes-are-evaluated",
        "a model is asked for classes that it does not know",
        Train(&["vision::evaluation_prediction_and_training_agree"]),
    ),
    ("ranks-that-differ-begin", "ranks train different things", Train(&["ends::ranks_that_differ_do_not_begin"])),
    ("other-validation-puzzles", "the puzzles to validate with are not told apart", Train(&["hrm_runs::sudokus_are_read_from_files"])),
    ("best-of-another-metric", "a best by another metric goes on counting", Train(&["best::the_best_by_another_metric_does_not_count"])),
    (
        "window-is-not-written",
        "config.json lacks the window",
        TrainLib(&["models::shape::tests::a_shape_of_every_family_is_read_as_it_was_written"]),
    ),
    (
        "llama3-scaling-of-another-context",
        "a default of config.json",
        Train(&["models::frequencies_are_scaled_as_transformers_scales_them"]),
    ),
    ("saving-counts-as-a-step", "the time of saving is the next step's", Train(&["speed::the_speed_of_a_record_is_that_of_its_own_steps"])),
    ("waits-of-all-steps", "a step has waited as long as all before it", Train(&["speed::a_step_waits_for_its_own_data_alone"])),
    ("waits-of-the-last-step", "only a window's last step has waited", TrainLib(&["timing::tests::waits_of_a_windows_steps_add_up"])),
    ("mfu-of-steps-that-take-a-second", "MFU without time", TrainLib(&["timing::tests::a_windows_figures_are_those_of_its_steps"])),
    ("watts-of-all-readings", "a sum in the place of a mean", TrainLib(&["nvml::tests::readings_become_means"])),
    (
        "epochs-recall-what-comes-later",
        "an epoch's mean counts steps behind the checkpoint",
        TrainLib(&["epochs::tests::means_are_those_of_one_epoch_however_often_it_was_stopped"]),
    ),
    (
        "validation-is-drawn-as-training",
        "TensorBoard has both under one name",
        TrainLib(&["metrics::tests::validation_has_a_place_of_its_own_in_tensorboard"]),
    ),
    ("standard-error-of-all-there-are", "divided by n, not n - 1", SURVEY),
    ("standard-error-without-its-root", "the error is squared", SURVEY),
    ("pass-at-4-is-of-2", "k is at most 2", SURVEY),
    (
        "memory-without-micro-batches",
        "batches that wait are counted once",
        TrainLib(&["run::load::tests::on_the_cpu_two_batches_wait_for_each_micro_batch"]),
    ),
    ("the-most-memory-of-a-rank", "ranks plan with what one of them lacks", TrainLib(&["memory::tests::the_least_that_a_rank_has_counts"])),
    ("decay-begins-in-the-warm-up", "the rate falls while it should rise", TrainLib(&["optim::schedule::tests::shapes"])),
    // The optimizer, what a step is made of, and evaluation.
    ("muon-without-decay", "Muon's matrices do not decay", TrainLib(&["optim::tests::muons_matrices_decay"])),
    ("tuned-batch-not-for-ranks", "a base brings a batch that ranks cannot divide", TUNED),
    ("tuned-batch-of-one-micro-batch", "a step has as many times the examples as micro-batches", TUNED),
    ("epochs-of-one-micro-batch", "epochs are as many times too long as a step has micro-batches", TUNED),
    ("lior-evaluates-what-fills-up", "a mean over more windows than there are", Train(&["lior::an_evaluation_is_a_mean_over_its_windows"])),
    // Adapters, folders, files for others.
    (
        "alpha-is-cut-to-a-whole-number",
        "an adapter is exported with less than its alpha",
        TrainLib(&["models::peft::tests::an_adapters_settings_are_read_as_they_were_written"]),
    ),
    (
        "adapters-of-another-alpha",
        "an adapter begins a run with another scale than it has",
        Train(&["models::runs_are_exported_as_adapters_and_as_models"]),
    ),
    (
        "gpt2-is-pruned-along-outputs",
        "of four outputs two stay, not of four inputs",
        Train(&["sparse::a_dense_folder_is_pruned_once_and_checked"]),
    ),
    ("gguf-without-chat-template", "a key is not what readers look for", GGUF_LLAMA3),
    ("gguf-without-rope-factors", "llama3's scaling is lost", GGUF_LLAMA3),
    ("letters-stay-capital", "do_lower_case is not read", ENCODER),
    ("encoders-known-without-weights", "another encoder of the same shape goes unnoticed", ENCODER),
    // Data.
    (
        "data-of-another-tokenizer",
        "a base learns ids that mean something else to it",
        Train(&["newcomer::a_base_without_data_is_not_trained_and_says_what_is_missing"]),
    ),
    ("questions-of-training-validate", "both splits are one", STEPS_WITH_REPLIES),
    (
        "validation-rows-by-the-seed",
        "runs of two seeds are validated with other rows",
        Train(&["replies::all_replies_to_a_prompt_are_on_one_side"]),
    ),
    (
        "data-known-without-what-is-learned",
        "other lengths of prompts go unnoticed",
        Train(&["replies::data_is_known_by_what_is_learned_of_it"]),
    ),
    ("files-called-validation-are-learned", "validation.jsonl is trained on", Train(&["replies::all_replies_to_a_prompt_are_on_one_side"])),
    ("pictures-known-without-labels", "pictures of other classes go unnoticed", Train(&["images::cifar_10_is_read_as_it_was_written"])),
    (
        "ignored-tokens-are-counted",
        "ranks divide by targets that do not count",
        TrainLib(&["data::source::tests::items_of_which_tokens_are_ignored_do_not_say_how_many_count"]),
    ),
    (
        "data-known-by-its-training-split",
        "another validation split goes unnoticed",
        TrainLib(&["data::dataset::tests::a_checksum_is_of_what_is_learned_and_of_what_validates"]),
    ),
    (
        "end-of-documents-forgotten",
        "what a data set says of its documents' end",
        Train(&["data::prepare_says_which_token_ends_documents_and_eos_sets_it"]),
    ),
    (
        "end-of-a-checkpoints-documents-forgotten",
        "a model without its data does not stop",
        TrainLib(&["text::tests::a_checkpoint_knows_how_its_documents_begin_and_end"]),
    ),
    (
        "padding-of-puzzles-is-learned",
        "what stands before the cells counts in the loss",
        TrainLib(&["recipes::hrm::puzzles::tests::what_stands_before_the_cells_is_not_learned"]),
    ),
    ("puzzles-in-one-form", "the same symmetric form in every epoch", PUZZLES),
    ("puzzles-in-one-order", "the same order in every epoch", PUZZLES),
    (
        "solved-before-it-halts",
        "a puzzle counts as often as its answer is right",
        TrainLib(&["recipes::hrm::act::tests::a_puzzle_is_right_once_where_the_model_halts_and_once_at_the_limit"]),
    ),
    ("pictures-always-mirrored", "data.mirror is not read", PICTURES),
    ("pictures-never-cut", "data.least_area is not read", PICTURES),
    // What is measured, asked and gone on with.
    ("overhead-of-one-plain-step", "the overhead is not that of both plain steps", TENSOR_CORES),
    ("tensor-cores-not-by-time", "a share counts nodes in the place of time", TENSOR_CORES),
    (
        "bytes-of-one-run",
        "what runs twice in a step moves its bytes once",
        TrainLib(&["profile::digest::tests::what_runs_twice_in_a_step_counts_twice"]),
    ),
    (
        "resume-of-the-oldest-run",
        "without a folder, the run that is longest ago goes on",
        Train(&["lifecycle::the_newest_run_goes_on_where_none_is_named"]),
    ),
    (
        "every-turn-draws-the-same",
        "turns of a conversation have the same draws",
        Train(&["chats::a_model_that_learned_to_chat_is_talked_to"]),
    ),
    // What survived when errors were planted once more.
    (
        "values-of-two-metrics-are-compared",
        "a resumed run measures losses against a best accuracy",
        TrainLib(&["run::best::tests::another_metric_than_the_best_ones_begins_anew"]),
    ),
    (
        "best-of-another-batch-of-all",
        "another batch of an evaluation of everything makes the best be forgotten",
        Train(&["best::the_best_of_all_of_the_data_counts_whatever_the_batch"]),
    ),
    (
        "schedule-of-earlier-versions",
        "a checkpoint that does not say its schedule is as long as its steps",
        TrainLib(&["run::tests::the_schedule_of_an_earlier_versions_run_is_as_long_as_its_horizon"]),
    ),
    (
        "skipped-steps-are-not-recorded",
        "a skipped step that was reported is in no record",
        Train(&["ends::a_skipped_step_is_recorded_wherever_it_is_seen"]),
    ),
    (
        "two-rows-of-skipped-steps-are-one",
        "an error names the first bad step of an earlier row",
        TrainLib(&["run::skips::tests::a_row_that_began_since_the_last_report_is_another"]),
    ),
    (
        "skips-before-a-resume-count-again",
        "a resumed run says again what was skipped before",
        Train(&["ends::a_resumed_run_does_not_say_again_what_was_skipped"]),
    ),
    (
        "init-from-again-on-resume",
        "a resumed run takes the weights that it began from",
        Train(&["lifecycle::a_run_that_began_from_weights_goes_on_from_its_own"]),
    ),
    (
        "epochs-counted-in-micro-batches",
        "an epoch takes as many times longer as a step has micro-batches",
        Train(&["ends::an_epoch_is_over_when_all_micro_batches_have_had_its_items"]),
    ),
    (
        "averages-of-nothing-are-saved",
        "zeros are saved as averages before any step counts",
        Train(&["ends::a_run_whose_steps_were_all_skipped_has_no_average"]),
    ),
    (
        "fitting-settings-forget-accumulate",
        "settings that fit make the step smaller",
        TrainLib(&["run::tests::settings_that_fit_keep_the_examples_of_a_step"]),
    ),
    (
        "parts-of-killed-saves-stay",
        "what ranks left of a killed save stays on the disk",
        TrainLib(&["checkpoint::tests::parts_that_a_killed_save_left_are_removed_by_the_next"]),
    ),
    (
        "masked-batches-are-evaluated",
        "a batch without a target that counts makes a validation NaN",
        Train(&["steps::a_batch_of_an_evaluation_without_a_target_that_counts_is_left_out"]),
    ),
    (
        "infinite-losses-count",
        "a step whose loss alone is infinite moves the weights",
        TrainLib(&["optim::tests::a_step_whose_loss_alone_is_not_finite_changes_nothing"]),
    ),
    (
        "muon-by-the-shorter-side",
        "Muon's steps are too short for long matrices",
        TrainLib(&["optim::tests::muon_moves_matrices_as_far_as_adamw"]),
    ),
    (
        "files-to-validate-with-alone",
        "a file called val.jsonl alone leaves nothing to learn",
        Train(&["replies::all_replies_to_a_prompt_are_on_one_side"]),
    ),
    (
        "prompts-known-by-their-last-turn",
        "two system messages are one prompt",
        Train(&["replies::the_same_question_behind_another_system_message_is_another_prompt"]),
    ),
    (
        "rows-of-tokens-known-without-labels",
        "other labels go unnoticed",
        TrainLib(&["data::seq2seq::triples::tests::rows_are_known_by_all_that_is_in_them_and_by_what_validates"]),
    ),
    (
        "rows-of-tokens-known-without-what-validates",
        "another validation split of rows of tokens goes unnoticed",
        TrainLib(&["data::seq2seq::triples::tests::rows_are_known_by_all_that_is_in_them_and_by_what_validates"]),
    ),
    (
        "other-beginnings-of-documents",
        "folders whose documents begin otherwise are mixed",
        TrainLib(&["data::prepared::tests::where_documents_begin_and_end_is_said_by_any_folder_that_knows"]),
    ),
    (
        "tokenizer-of-the-first-folder",
        "the end of documents is not known where the first folder does not say it",
        TrainLib(&["data::prepared::tests::where_documents_begin_and_end_is_said_by_any_folder_that_knows"]),
    ),
    (
        "gate-of-an-evaluation-fully-open",
        "an evaluation ignores the gate's scale",
        Train(&["hrm_lm::an_evaluation_has_the_scale_of_the_gate"]),
    ),
    (
        "gate-of-a-reply-fully-open",
        "replies ignore the gate's scale",
        TrainLib(&["recipes::hrm_lm::generate::tests::a_reply_is_what_the_whole_text_says_without_a_cache"]),
    ),
    (
        "balance-of-every-micro-batch-whole",
        "the balance loss counts once for each micro-batch",
        Train(&["hrm_lm::the_balance_of_a_step_is_a_mean_over_its_micro_batches"]),
    ),
    (
        "replies-begin-otherwise",
        "a checkpoint without its data forgets what replies begin with",
        TrainLib(&["source_target::tests::a_checkpoint_knows_how_replies_begin"]),
    ),
    (
        "three-of-four-are-sparse",
        "a folder with three weights in a group passes for 2:4",
        Train(&["sparse::three_weights_in_one_group_of_four_are_not_sparse"]),
    ),
    (
        "replies-of-tokens-beyond-the-tokenizer",
        "a reply has tokens that the tokenizer does not have",
        TrainLib(&["sample::tests::a_reply_has_no_tokens_that_the_tokenizer_does_not_have"]),
    ),
    (
        "evaluations-that-were-undone-are-shown",
        "the best of a run that went back is of weights that are gone",
        TrainLib(&["watch::tests::an_evaluation_of_a_step_that_was_repeated_without_one_is_gone"]),
    ),
    (
        "fingerprint-without-the-warm-up",
        "a figure of another warm-up passes for this program's",
        EngineLib(&["fingerprint::tests::another_warm_up_is_another_fingerprint"]),
    ),
    (
        "parts-of-a-plan-end-early",
        "a part of a plan takes less than it holds at once",
        Engine(&["graphs::the_memory_of_a_part_is_what_it_holds_at_once"]),
    ),
    (
        "plan-overwrites-what-is-read-twice",
        "an op writes over what it reads as another input",
        Engine(&["graphs::what_an_op_reads_twice_is_not_overwritten"]),
    ),
    (
        "plan-joins-one-value-twice",
        "of a value that is joined with itself one half is never written",
        Engine(&["graphs::a_value_is_joined_with_itself"]),
    ),
    (
        "zero-divides-what-is-read-elsewhere",
        "a moment that something else reads is divided",
        Engine(&["ranks::moments_that_something_else_reads_are_not_divided"]),
    ),
    (
        "scatters-parts-of-other-axes",
        "columns of a sum are taken for a piece of its elements in a row",
        Engine(&["ranks::parts_of_a_sum_over_ranks_are_those_of_the_whole"]),
    ),
    (
        "scatters-sums-that-are-put-out",
        "a sum that is read after the run is a rank's own term",
        Engine(&["ranks::parts_of_a_sum_over_ranks_are_those_of_the_whole"]),
    ),
    (
        "adam8bit-of-parts-of-blocks",
        "blocks of 256 end with a rank's part",
        Engine(&["adam8bit::parts_of_ranks_that_are_no_whole_blocks_stay_f32"]),
    ),
    (
        "adam8bit-of-states-that-begin-elsewhere",
        "a state that begins with other numbers begins with 0",
        Engine(&["adam8bit::states_that_begin_with_other_numbers_stay_f32"]),
    ),
    (
        "dropout-of-rows-in-a-ranks-own-order",
        "dropout of experts' rows depends on the number of ranks",
        Engine(&["ranks::rows_in_an_order_of_ones_own_are_refused_elsewhere"]),
    ),
    (
        "fuse-norm-of-other-eps",
        "norms of different eps become one",
        Engine(&["passes::norms_around_a_residual_connection_are_one_where_their_eps_is_the_same"]),
    ),
    (
        "residual-f32-begins-narrow",
        "with residual=f32 the residual stream begins in bf16",
        Engine(&["graphs::an_embedding_begins_the_residual_stream_in_its_type"]),
    ),
    (
        "gemm-epilogue-adds-after-an-activation",
        "what is added behind ReLU is added before it",
        Engine(&["graphs::epilogues_keep_the_order_of_what_they_take_in"]),
    ),
    ("gemm-epilogue-with-two-biases", "of two biases one is lost", Engine(&["graphs::epilogues_keep_the_order_of_what_they_take_in"])),
    (
        "attention-of-a-query-that-sees-nothing",
        "a query that sees no key has the mean of all values",
        Engine(&["graphs::a_query_that_sees_no_key_gives_zeros"]),
    ),
    (
        "gradient-of-no-targets-is-old-memory",
        "without a target that counts a gradient is what lay in its place",
        Engine(&["graphs::without_a_target_that_counts_gradients_are_zeros"]),
    ),
];
