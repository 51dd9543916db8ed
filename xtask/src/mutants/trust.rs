//! Errors of what is not to be trusted: libraries, links, pages, ops of other crates.

use super::By::{Engine, EngineLib, Train, TrainLib};
use super::{By, Mutant};

const HANDED_ON: By = Train(&["shared::no_command_that_hands_a_model_on_copies_what_a_link_leads_to"]);
const LIMITS: By = TrainLib(&["data::chats::row_tests::white_space_and_turns_have_a_limit"]);
const RECEIPTS: By = Train(&["watched::long_receipts_are_sent_in_part"]);
const EXPLODES: By = Train(&["tokenizers::a_tokenizer_that_explodes_is_refused"]);
const WRITES: By = Train(&["templates::a_template_that_writes_without_end_is_refused"]);
const MANY: By = Train(&["watched::of_very_many_runs_and_evaluations_a_part_is_kept"]);

pub const MUTANTS: &[Mutant] = &[
    (
        "a-library-is-loaded-beside-open-folders",
        "a library that may be loaded makes all of LD_LIBRARY_PATH good",
        EngineLib(&["cuda::libraries::tests::nothing_is_loaded_where_others_can_write_to_a_part_of_the_loaders_path"]),
    ),
    (
        "relative-prefixes-name-environments",
        "CONDA_PREFIX that is set but empty is the working directory",
        TrainLib(&["launch::tests::variables_that_are_set_but_empty_or_relative_name_no_environment"]),
    ),
    (
        "an-mpiexec-of-anybodys",
        "mpiexec is started whoever wrote it",
        TrainLib(&["launch::tests::an_mpiexec_that_others_could_have_written_is_not_started"]),
    ),
    (
        "profilers-of-the-working-directory",
        "relative parts of PATH are searched for nsys",
        TrainLib(&["profile::nsight::tests::a_profiler_is_not_taken_from_the_working_directory"]),
    ),
    (
        "a-checkout-of-anybodys-is-run",
        "--against pytorch runs a checkout that others can write to",
        TrainLib(&["cli::bench::peers::tests::a_checkout_that_others_can_write_to_is_run_only_where_it_is_named"]),
    ),
    ("a-models-links-are-followed-out", "files of a model are copied wherever they lie", HANDED_ON),
    (
        "any-folder-of-snapshots-is-a-hubs",
        "links to ../../blobs are followed in any folder",
        Train(&["shared::links_to_a_hubs_blobs_are_followed_and_no_others"]),
    ),
    (
        "a-base-that-is-named-is-not-checked",
        "the cache's checksums are for recipes alone",
        Train(&["shared::a_base_of_the_cache_that_is_damaged_is_refused_whoever_names_it"]),
    ),
    (
        "an-adapter-names-the-cache",
        "an exported adapter says where its maker's cache is",
        Train(&["shared::an_adapter_does_not_name_the_cache_of_whoever_made_it"]),
    ),
    (
        "a-run-folder-with-links-out-is-written-to",
        "links in a run's folder are not looked at",
        Train(&["shared::a_run_folder_with_a_link_that_leads_out_is_refused_when_it_is_written_to"]),
    ),
    (
        "a-runs-files-are-written-through-links",
        "a link that comes while a run goes on is written through",
        Train(&["shared::links_that_come_while_a_run_goes_on_lead_no_write_away"]),
    ),
    (
        "what-came-while-data-was-prepared-is-removed",
        "--force looks at the beginning alone",
        TrainLib(&["data::prepare::tests::what_comes_while_data_is_prepared_is_kept"]),
    ),
    (
        "what-is-called-as-shards-is-removed",
        "--force looks at names alone",
        TrainLib(&["data::prepare::tests::force_removes_nothing_that_is_no_data_sets"]),
    ),
    (
        "large-pictures-are-read-all-at-once",
        "each thread decodes a picture of any size",
        TrainLib(&["data::images::picture::tests::very_large_pictures_are_read_one_at_a_time"]),
    ),
    (
        "ranks-of-one-machine-have-no-secret",
        "children of --ranks are not told the job's secret",
        TrainLib(&["launch::local::tests::ranks_of_one_machine_are_given_the_jobs_secret_and_meet_on_loopback"]),
    ),
    (
        "a-job-without-a-secret-says-nothing",
        "the warning is left out",
        TrainLib(&["launch::gpus::tests::a_job_without_a_secret_is_warned_of_once"]),
    ),
    (
        "nccl-listens-for-the-network",
        "ranks of one machine let NCCL listen everywhere",
        TrainLib(&["launch::gpus::tests::ranks_of_one_machine_talk_on_loopback"]),
    ),
    (
        "mpis-ranks-listen-for-the-network",
        "ranks of one machine over MPI listen everywhere",
        Train(&["launch::ranks_of_one_machine_listen_on_loopback"]),
    ),
    (
        "work-goes-on-for-nobody",
        "a template is rendered on after whoever asked was killed",
        Train(&["templates::what_renders_ends_with_who_asked"]),
    ),
    ("white-space-without-end", "gigabytes of empty lines are read to their end", LIMITS),
    ("conversations-of-any-length", "a row may have any number of turns", LIMITS),
    (
        "parts-of-bytes",
        "ranks' parts of numbers smaller than a byte are put together",
        TrainLib(&["checkpoint::tests::parts_of_ranks_that_do_not_fit_are_refused"]),
    ),
    (
        "messages-of-any-length",
        "what a file says makes a message as long as itself",
        TrainLib(&["report::shown::tests::of_a_long_message_the_beginning_and_the_end_are_shown"]),
    ),
    ("receipts-are-sent-whole", "long lists and texts are sent to the page", RECEIPTS),
    ("receipts-of-any-length", "what is left of receipts has no bound", RECEIPTS),
    (
        "any-drawing-is-served",
        "drawings may refer to themselves",
        Train(&["watched::only_drawings_of_the_kind_that_kiln_writes_are_served"]),
    ),
    ("evaluations-without-end", "every evaluation of a file is kept", MANY),
    ("any-number-of-runs-is-shown", "a page has every run", MANY),
    (
        "a-plan-is-not-verified",
        "what ops say of memory is believed",
        Engine(&["hostile::an_op_that_says_another_thing_later_is_refused", "hostile::a_plan_that_was_changed_is_refused"]),
    ),
    (
        "whatever-is-called-temporary-is-removed",
        "files of the user's own are removed because of their names",
        TrainLib(&["files::tests::only_what_kiln_itself_names_so_is_taken_away"]),
    ),
    (
        "folders-for-processors-are-not-looked-at",
        "a library that others planted in glibc-hwcaps is loaded",
        EngineLib(&["cuda::libraries::tests::nothing_is_loaded_where_others_can_write_to_a_part_of_the_loaders_path"]),
    ),
    (
        "parts-are-cut-any-number-of-times",
        "a part of a rank may be cut out of itself until the stack ends",
        TrainLib(&["checkpoint::tests::parts_that_are_cut_very_often_are_refused"]),
    ),
    ("moments-of-nan-are-read", "a run goes on from moments of NaN", TrainLib(&["checkpoint::tests::moments_of_nan_are_refused_by_name"])),
    (
        "lines-without-end-are-read",
        "gigabytes without an end of a line are read",
        TrainLib(&["watch::tests::lines_without_end_are_not_read_to_their_end"]),
    ),
    (
        "uninterruptible-work-has-any-time",
        "a tokenizer may take any time",
        Train(&["tokenizers::a_tokenizer_whose_time_grows_with_the_square_of_a_text_is_stopped"]),
    ),
    (
        "a-groups-cache-is-used",
        "a cache that a group may write to is used",
        TrainLib(&["gpu::tests::a_cache_that_a_group_may_write_to_is_not_used"]),
    ),
    ("patterns-of-any-size", "a tokenizer's regular expressions may take gigabytes", EXPLODES),
    ("added-tokens-have-any-length", "a tokenizer's added tokens may be as long as they like", EXPLODES),
    ("words-have-any-length", "WordPiece looks at words of any length", EXPLODES),
    ("normalizers-grow-without-end", "a normalizer may make any number of bytes of one", EXPLODES),
    ("any-number-of-pieces-is-put-together", "a post-processor may add any number of tokens", EXPLODES),
    (
        "normalizers-make-any-length",
        "a normalizer that grows texts is given a long one",
        TrainLib(&["data::tokenizer::words::tests::a_normalizer_that_grows_text_is_given_no_long_one"]),
    ),
    ("templates-have-any-length", "a template's source has no limit", TrainLib(&["data::chats::tests::a_template_has_a_longest_source"])),
    ("templates-take-any-number-of-steps", "a template may take all steps", Train(&["templates::a_template_that_never_ends_is_refused"])),
    ("templates-write-any-text", "what a template writes has no limit", WRITES),
    (
        "files-take-any-memory",
        "what renders templates may take all memory",
        Train(&["templates::a_template_that_takes_all_memory_is_refused"]),
    ),
    ("files-take-any-time", "what renders templates may take all time", Train(&["templates::a_template_that_never_ends_is_refused"])),
    (
        "merged-adapters-under-dropout",
        "an adapter whose input has dropout is merged",
        Engine(&["merged::what_cannot_be_merged_is_declined"]),
    ),
    (
        "merged-adapters-without-their-scale",
        "adapters are merged without their scale",
        Engine(&["merged::a_phase_computes_what_it_computes_without_and_never_with_an_older_merge"]),
    ),
];
