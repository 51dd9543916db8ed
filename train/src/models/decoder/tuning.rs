//! How a decoder from a folder is fine-tuned where nothing else is said. Presets are for models that are drawn at random: their learning rates would undo
//! what a pretrained one has learned, and their rows and steps know nothing of the data.

use super::lessons::own_tokenizer;
use super::{RepliesConfig, is_plain};
use crate::config::{Config, TrainConfig};
use crate::data::{Prepared, Source, Split};
use crate::models::Folder;
use crate::recipe::{Set, TrainError, Tuning};
use std::path::Path;

/// The usual rates of supervised fine-tuning: adapters begin at zero and bear, and need, more.
const RATE: f64 = 1e-5;
const ADAPTERS_RATE: f64 = 2e-4;
/// From here on the weights of a pretrained model are soon lost. Adapters leave them alone.
const HIGH: f64 = 1e-3;
const WARMUP: f64 = 0.03;
/// Rows are no longer than this, unless someone asks for it.
const LONGEST: usize = 2048;
const TEXT: usize = 1024;
/// Rows are multiples of it, as GEMMs like them.
const MULTIPLE: usize = 64;
/// Conversations that a step learns from. Packed, they take fewer rows.
const EXAMPLES: u64 = 16;
/// Rows of running text in a step; fewer where an epoch would then be shorter than so many steps.
const ROWS: u64 = 8;
const LEAST_STEPS: u64 = 50;
const CHAT_EPOCHS: f64 = 3.0;
const TEXT_EPOCHS: f64 = 1.0;

/// For a config with a base, whose sizes are in it already.
pub fn tuning(config: &Config, adapters: bool) -> Result<Option<Tuning>, TrainError> {
    let Some(base) = config.base() else { return Ok(None) };
    let folder = Folder::open(Path::new(base))?;
    let (of, rate) = if adapters { ("adapters", ADAPTERS_RATE) } else { ("all weights", RATE) };
    let mut sets = vec![
        Set::new("train.learning_rate", rate, ""),
        Set::new("train.schedule", "cosine", ""),
        Set::new("train.final_rate", 0.1, ""),
        Set::new("train.weight_decay", 0.0, ""),
    ];
    let (data, rows) = (config.section::<RepliesConfig>("data")?, of_data(config, &folder)?);
    sets.extend(rows.sets);
    // Text that is generated has no end.
    let epochs = if rows.is_text { TEXT_EPOCHS } else { CHAT_EPOCHS };
    if !data.path.is_empty() && !config.is_given("train.steps") {
        // A mixture has no epochs of its own.
        sets.push(match rows.mixed {
            None => Set::new("train.epochs", epochs, ""),
            Some((items, batch)) => {
                let parts: u64 = config.section::<TrainConfig>("train")?.accumulate as u64;
                let steps = (epochs * items as f64 / (batch * parts) as f64).ceil().max(1.0) as i64;
                Set::new("train.steps", steps, format!("as many as {epochs} passes through all {items} rows of the mixture take"))
            }
        });
    }
    let highest_rate = if adapters { f64::MAX } else { HIGH };
    Ok(Some(Tuning { of, sets, warmup: WARMUP, items: rows.items, highest_rate }))
}

/// The longest row that is learned of conversations by a model with so many positions, where no other is asked for.
pub fn longest_row(context: usize) -> usize {
    LONGEST.min(context)
}

/// The row that the longest example asks for.
pub fn row(longest: usize, most: usize) -> usize {
    longest.next_multiple_of(MULTIPLE).min(most)
}

#[derive(Default)]
struct Rows {
    sets: Vec<Set>,
    items: Option<u64>,
    is_text: bool,
    /// Of a mixture, all rows of its parts, and how many are in a micro-batch.
    mixed: Option<(u64, u64)>,
}

/// The length of rows, and how many are in a step.
fn of_data(config: &Config, folder: &Folder) -> Result<Rows, TrainError> {
    let data: RepliesConfig = config.section("data")?;
    let (chosen, ranks) = (data.path.find()?, config.ranks.data.size as u64);
    let seq = config.value("model", "seq").and_then(|v| v.as_integer()).unwrap_or_default() as usize;
    let asked = config.is_given("model.seq");
    let own = |rows: u64| rows.max(1).next_multiple_of(engine::mutant!("tuned-batch-not-for-ranks", ranks, 1)) as i64;
    if data.path.is_empty() {
        let short = Set::new("model.seq", seq.min(folder.shape.context) as i64, "the base's positions");
        return Ok(Rows { sets: vec![short], ..Rows::default() });
    }
    let given_batch = config.is_given("train.batch").then(|| config.section::<TrainConfig>("train").map(|c| c.batch as u64)).transpose()?;
    if chosen.prepared()? {
        let set = Prepared::of(chosen)?;
        let tokens = Split::ALL.into_iter().filter_map(|split| set.fewest(split)).filter(|n| *n > 1).min().unwrap_or(2) as usize - 1;
        let most = TEXT.min(folder.shape.context).min(tokens);
        let seq = if asked { seq } else { most };
        let items = set.tokens(Split::Train) / seq.max(1) as u64;
        let rows = own((items / LEAST_STEPS).clamp(1, ROWS));
        let sets = vec![Set::new("model.seq", most as i64, ""), Set::new("train.batch", rows, "")];
        let mixed = set.is_mixture().then_some((items, given_batch.unwrap_or(rows as u64)));
        return Ok(Rows { sets, items: None, is_text: true, mixed });
    }
    // What cannot be read is refused where it is read to be learned.
    if chosen.paths().any(|path| is_plain(path)) {
        return Ok(Rows::default());
    }
    let tokenizer = own_tokenizer(Some(folder))?;
    let usual = data.usual_template(&tokenizer, &folder.path);
    let mut sets: Vec<Set> = usual
        .map(|name| Set::new("data.template", name, "the base has no chat template; what is exported has this one"))
        .into_iter()
        .collect();
    if asked && given_batch.is_some() && config.is_given("train.steps") {
        return Ok(Rows { sets, ..Rows::default() });
    }
    let data = RepliesConfig { template: usual.map_or(data.template, String::from), ..data };
    let most = if asked { seq } else { longest_row(folder.shape.context) };
    let (files, _) = data.chats(&chosen, &tokenizer, Some(&folder.path), (folder.shape.vocab, most))?;
    let longest = files.iter().flat_map(|files| files.examples()).map(|e| e.places()).max().unwrap_or(1);
    let long = row(longest, most);
    let (mut items, mut examples) = (0, 0);
    for files in &files {
        items += files.rows(Split::Train, if asked { seq } else { long }, data.pack, config.seed(), vec![])?.len();
        examples += files.count(Split::Train) as u64;
    }
    let c: TrainConfig = config.section("train")?;
    let parts = engine::mutant!("tuned-batch-of-one-micro-batch", c.accumulate as u64, 1);
    let batch = own((EXAMPLES * items).div_ceil(examples.max(1)).div_ceil(parts));
    let why = match files.iter().map(|files| files.counts.cut).sum::<usize>() {
        0 => format!("the longest example has {longest} tokens"),
        cut => format!("{cut} examples are longer, and are cut"),
    };
    sets.extend([
        Set::new("model.seq", long as i64, why),
        Set::new("train.batch", batch, format!("about {EXAMPLES} examples a step")),
        // On everything that is kept for it.
        Set::new("train.eval_batches", 0, ""),
    ]);
    let mixed = chosen.is_mixture();
    // Once an epoch.
    sets.extend((!mixed).then(|| Set::new("train.eval_every", 0, "")));
    let mixed = mixed.then_some((items, given_batch.unwrap_or(batch as u64)));
    Ok(Rows { sets, items: (items > 0 && mixed.is_none()).then_some(items), is_text: false, mixed })
}
