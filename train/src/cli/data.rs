//! `kiln data`: prepares text, inspects data sets, draws sheets of pictures, shows chats as they are learned.

use super::signals::Signal;
use super::{Recipes, write_json};
use crate::config::Config;
use crate::data::chats;
use crate::data::images::pictures::augmented_pictures;
use crate::data::images::{self, Block, Format};
use crate::data::{DataError, Dataset, Input, Paths, PrepareOptions, Split, inspect, listed, percent, prepare};
use crate::recipe::{self, Reads, Recipe, Session};
use crate::report::quoted;
use crate::run::write_bytes;
use crate::warn;
use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use engine::philox::rng_feed;
use engine::{Cpu, DType, Data, Device, Recorder, Switches};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

#[derive(Args)]
#[command(after_help = "Examples:
  kiln data prepare book.txt --out data/book
  kiln data inspect data/book
  kiln data preview --data data/cifar-10-batches-bin --out sheet.png
  kiln data preview --data chats.jsonl --base models/qwen2.5-0.5b --count 2")]
pub struct DataArgs {
    #[command(subcommand)]
    command: DataCommand,
}

#[derive(Subcommand)]
enum DataCommand {
    /// Turns text into token shards
    Prepare(PrepareArgs),
    /// What a data set's folder or a shard holds, and whether it is whole; or how many conversations of which layout are in a file or a folder
    #[command(after_help = "Examples:
  kiln data inspect data/book
  kiln data inspect data/book/train-00000.tokens --json
  kiln data inspect data/cifar-10-batches-bin
  kiln data inspect chats.jsonl
  kiln data inspect 'more/*.jsonl' extra.jsonl
  kiln data inspect data/wiki:0.9 data/math:0.1")]
    Inspect {
        /// Several are looked at as training reads them: files of conversations are one set, and those with weights are mixed
        #[arg(required = true, value_name = "PATH[:WEIGHT]")]
        paths: Vec<String>,
        /// Prints JSON
        #[arg(long)]
        json: bool,
    },
    /// What training sees. With --out a sheet of a set's pictures, a row for each class: as they are, and as training sees them (cut, and mirrored
    /// by chance). With --base rows of chats as text, with the learned tokens marked
    Preview(PreviewArgs),
}

#[derive(Args)]
#[command(after_help = "Ctrl-C (or SIGTERM) leaves nothing behind; what a killed process left is removed by the next one.

Examples:
  kiln data prepare book.txt --out data/book
  kiln data prepare a.jsonl b.jsonl.gz c.parquet --field body --tokenizer tokenizer.json --out data/web
  kiln data prepare book.txt --tokenizer models/qwen3-0.6b --eos '<|endoftext|>' --out data/book
  kiln data prepare --generated 20000 --out data/made")]
struct PrepareArgs {
    /// UTF-8 text files, each a document; or rows with a document each: .jsonl, .jsonl.gz or parquet
    files: Vec<PathBuf>,
    /// The field of a row (a parquet file's column) that holds the text
    #[arg(long, default_value = "text")]
    field: String,
    /// byte, or the path of a tokenizer.json or of the model's folder that holds it
    #[arg(long, default_value = "byte")]
    tokenizer: String,
    /// The token that ends a document: its name or number, or none. If not given: what generation_config.json, tokenizer_config.json or
    /// config.json beside the tokenizer name, or an added special token of a well-known name
    #[arg(long, value_name = "TOKEN_OR_ID|none")]
    eos: Option<String>,
    /// The token before a document: its name or number, or none. If not given: what the tokenizer itself (its post-processor) puts before a text
    #[arg(long, value_name = "TOKEN_OR_ID|none")]
    bos: Option<String>,
    /// The folder to make
    #[arg(long)]
    out: PathBuf,
    /// Share of the documents kept for validation; of fewer than ten text files, the last part of each. 0: none
    #[arg(long, default_value_t = 0.05)]
    val_share: f64,
    /// Tokens of one shard
    #[arg(long, default_value_t = 100_000_000)]
    shard_tokens: u64,
    /// Sentences of generated text instead of files
    #[arg(long, value_name = "SENTENCES", conflicts_with = "files")]
    generated: Option<u64>,
    /// Seed of the generated text
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Replaces a data set that is there already
    #[arg(long)]
    force: bool,
}

#[derive(Args)]
#[command(after_help = "Examples:
  kiln data preview --out sheet.png
  kiln data preview --data photos --least-area 0.3 --out sheet.png
  kiln data preview --data digits --mirror false --out sheet.png
  kiln data preview --data data/cifar-10-batches-bin --split val --count 100 --out sheet.png
  kiln data preview --data chats.jsonl --base models/qwen2.5-0.5b --count 2     # chats, with the learned tokens marked
  kiln data preview --data chats.jsonl --base models/qwen2.5-0.5b --seq 1024 --set data.learn=last --set data.pack=false")]
struct PreviewArgs {
    /// Pictures: a folder with CIFAR-10 (binary or Python version) or CIFAR-100 (binary version), with parquet files of pictures, or with a folder for
    /// each class; or generated. Chats: a file of conversations (JSON lines, gzip of them, parquet), or a folder of such files; several, patterns and mixtures
    /// as in training
    #[arg(long, value_name = "PATH[:WEIGHT]", num_args = 1.., default_value = "generated")]
    data: Vec<String>,
    /// Pictures: the PNG file to write
    #[arg(long, required_unless_present = "base")]
    out: Option<PathBuf>,
    /// Chats: a model's folder, whose chat template and tokenizer they are put through
    #[arg(long, value_name = "FOLDER", conflicts_with = "out")]
    base: Option<PathBuf>,
    /// Chats: data.learn in training: assistant, last or all
    #[arg(long)]
    learn: Option<String>,
    /// Chats: tokens of a row, model.seq in training. If not given: as in training with this base
    #[arg(long)]
    seq: Option<usize>,
    /// Chats: a config key of [data], as in training: data.pack=false (repeatable)
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Chats: every example of the split as a line of JSON with its row, its tokens and which of them are learned
    #[arg(long, requires = "base")]
    json: bool,
    /// The most pictures, or rows of chats, to show
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1000))]
    count: u32,
    /// Which split is shown; pictures of the val and test splits are never augmented
    #[arg(long, default_value = "train", value_parser = [Split::Train.name(), Split::Val.name(), images::TEST])]
    split: String,
    /// Pictures: smallest share of the area that a random crop leaves, data.least_area in training [default: 0.8]
    #[arg(long, conflicts_with = "base")]
    least_area: Option<f32>,
    /// Pictures: whether they are mirrored every other time, data.mirror in training [default: true]
    #[arg(long, value_name = "true|false", conflicts_with = "base")]
    mirror: Option<bool>,
    /// Pictures: decides which are shown, how they are augmented, and how generated ones are drawn. Chats: the order in which they are packed
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Pictures: cifar-10, cifar-10-python, cifar-100, parquet or folder; detected if not given
    #[arg(long, conflicts_with = "base")]
    format: Option<Format>,
    /// Pictures: pixels a side that those of a folder are resized to [default: as in training, 32 or what all of them have]
    #[arg(long, conflicts_with = "base")]
    size: Option<usize>,
}

pub fn run(a: DataArgs, recipes: Recipes) -> Result<ExitCode> {
    match a.command {
        DataCommand::Prepare(a) => prepare_text(a, recipes),
        DataCommand::Inspect { paths, json } => inspect_all(paths, json, recipes),
        DataCommand::Preview(a) => preview(a, recipes),
    }
}

fn prepare_text(a: PrepareArgs, recipes: Recipes) -> Result<ExitCode> {
    let PrepareArgs { files, field, tokenizer, eos, bos, out, val_share, shard_tokens, generated, seed, force } = a;
    let input = match generated {
        Some(0) => bail!("--generated 0: at least one sentence"),
        Some(sentences) => Input::Generated { seed, sentences },
        None if files.is_empty() => bail!("name at least one text, .jsonl, .jsonl.gz or .parquet file, or --generated SENTENCES"),
        None => Input::Files { paths: files, field },
    };
    let options = PrepareOptions { val_share, shard_tokens, force, eos, bos, ..PrepareOptions::new(input, &tokenizer, &out) };
    let signal = Signal::catch(&options.stop, &Arc::default())?;
    let s = match prepare(&options) {
        Err(e @ DataError::Interrupted) => {
            warn!("{e}");
            return Ok(signal.code());
        }
        other => other?,
    };
    let d = &s.dataset;
    out!(
        "{}: {} training and {} validation tokens of {} ({} tokens in its vocabulary)",
        s.out.display(),
        d.train.tokens,
        d.val.tokens,
        d.tokenizer,
        d.vocab
    );
    for note in &s.notes {
        out!("{note}");
    }
    if let Some(recipe) = reader(recipes, Reads::Text) {
        // Rows are as long as the preset has them, where the text is.
        let most = [d.train.tokens, d.val.tokens].into_iter().filter(|n| *n > 0).min().unwrap_or(0).saturating_sub(1) as i64;
        let seq = recipe::preset(recipe, None)?.value("model", "seq").and_then(|v| v.as_integer());
        let shorter = seq.filter(|seq| *seq > most).map_or(String::new(), |_| format!(" --set model.seq={}", most.max(1)));
        out!("train on it with: kiln train {} --data {}{shorter}", recipe.name(), quoted(&s.out.display().to_string()));
    }
    Ok(ExitCode::SUCCESS)
}

/// Each part of a mixture, and of it the conversations together and everything else by itself.
fn inspect_all(paths: Vec<String>, json: bool, recipes: Recipes) -> Result<ExitCode> {
    let chosen = Paths::from(paths).find()?;
    let (mut all, mut broken) = (vec![], vec![]);
    for part in &chosen.parts {
        part.paths.iter().try_for_each(|path| refuse_model(path))?;
        if chosen.is_mixture() && !json {
            out!("{} from {}", percent(part.share), part.name);
        }
        let (rows, others): (Vec<PathBuf>, Vec<PathBuf>) = part.paths.iter().cloned().partition(|path| {
            let is_set = path.join(Dataset::FILE).exists();
            !is_set && chats::holds_rows(path) && Format::detect(path).is_none()
        });
        let mut seen = vec![];
        if !rows.is_empty() {
            seen.push(inspect_chats(&rows, json, recipes)?);
        }
        for path in &others {
            let (value, whole) = inspect_data(path, json, recipes)?;
            seen.push(value);
            broken.extend((!whole).then(|| path.display().to_string()));
        }
        for mut value in seen {
            if chosen.is_mixture() {
                value["share"] = part.share.into();
            }
            all.push(value);
        }
    }
    match &mut all[..] {
        _ if !json => {}
        [one] => write_json(None, one)?,
        all => write_json(None, &all.to_vec().into())?,
    }
    match &broken[..] {
        [] => Ok(ExitCode::SUCCESS),
        broken => bail!("{} has corrupted shards", broken.join(", ")),
    }
}

fn refuse_model(path: &Path) -> Result<()> {
    if path.join("config.json").exists() && ["model.safetensors", "model.safetensors.index.json"].iter().any(|f| path.join(f).exists()) {
        let shown = quoted(&path.display().to_string());
        bail!("{} is a model's folder, and no data: kiln check model {shown} says what it holds", path.display());
    }
    Ok(())
}

/// What there is to say for programs, and whether it is whole.
fn inspect_data(path: &Path, json: bool, recipes: Recipes) -> Result<(Value, bool)> {
    if let Some(format) = Format::detect(path).filter(|_| !path.join(Dataset::FILE).exists()) {
        return Ok((inspect_images(path, format, json, recipes)?, true));
    }
    let found = inspect(path)?;
    let value = serde_json::to_value(&found)?;
    if !json {
        if let Some(d) = &found.dataset {
            out!("{}: tokenizer {} (fingerprint {:016x}), vocabulary {}", path.display(), d.tokenizer, d.fingerprint, d.vocab);
            out!("train {} tokens in {} documents, validation {} in {}", d.train.tokens, d.train.documents, d.val.tokens, d.val.documents);
            match &found.end {
                Some(end) => out!("{end}"),
                None if d.eos.is_none() => out!("which token ends documents is not said: it was prepared by an earlier version"),
                None => {}
            }
            for line in found.begin.iter().chain(&found.pad) {
                out!("{line}");
            }
            if let Some(floor) = d.entropy_floor {
                out!("entropy {floor:.4} nats a token");
            }
        }
        for s in &found.shards {
            let whole = if s.checksum_ok { "whole" } else { "CORRUPTED" };
            out!("{}: {} tokens of {} bytes, vocabulary {}, {whole}", s.path.display(), s.tokens, s.bytes_per_token, s.vocab);
        }
        if let Some(text) = &found.first_text {
            out!("begins: {text:?}");
        }
    }
    Ok((value, found.shards.iter().all(|s| s.checksum_ok)))
}

fn preview(a: PreviewArgs, recipes: Recipes) -> Result<ExitCode> {
    let PreviewArgs { data, out, count, split, least_area, mirror, seed, format, size, base, learn, seq, mut set, json } = a;
    let out = match (out, base) {
        (Some(_), _) if learn.is_some() || seq.is_some() || !set.is_empty() => bail!("--learn, --seq and --set are for chats, with --base"),
        (Some(out), _) => out,
        (None, Some(base)) => {
            let recipe = reader(recipes, Reads::Replies).context("no recipe reads chats")?;
            set.extend(learn.map(|learn| format!("data.learn={learn}")));
            let mut config = Config::new(recipe.name(), "", recipe.sections());
            set.iter().try_for_each(|assignment| config.set(assignment))?;
            super::set_data(&mut config, &data)?;
            if split == images::TEST {
                bail!("--split test is for pictures: chats have a train and a val split");
            }
            let split = Split::ALL[usize::from(split == Split::Val.name())];
            return super::chats::preview(
                config.section("data")?,
                &base,
                super::chats::Shown { split, seq, seed, count: count as usize, json },
            );
        }
        (None, None) => bail!("--out names the picture to write"),
    };
    let [data] = &data[..] else { bail!("--data {}: pictures are shown of one folder", data.join(" ")) };
    let data = Path::new(data);
    let (least_area, mirror) = (least_area.unwrap_or(0.8), mirror.unwrap_or(true));
    if !(least_area > 0.0 && least_area <= 1.0) {
        bail!("--least-area {least_area} is not above 0 and at most 1");
    }
    let val = split == Split::Val.name();
    let set = if data == Path::new("generated") {
        if split == images::TEST {
            bail!("generated pictures have a train and a val split, no test split");
        }
        if format.is_some() || size.is_some() {
            bail!("--format and --size are for folders; generated pictures have {0}x{0} pixels", images::SIZE);
        }
        let split = Split::ALL[usize::from(val)];
        images::generate(seed, split, images::GENERATED[split as usize])
    } else {
        let size = size.map_or_else(|| trained_size(data, recipes), Ok)?;
        let sets = images::open(data, format, size, images::VAL_SHARE)?;
        match &split[..] {
            images::TEST => sets.test.with_context(|| format!("{} has no test split", data.display()))?,
            _ if val => sets.val,
            _ => sets.train,
        }
    };
    let (chosen, columns) = images::by_class(&set, count as usize, seed);
    let pixels: Vec<&[u8]> = chosen.iter().flatten().map(|i| set.item(*i).0).collect();
    let block = |heading, pixels: &[u8]| {
        let mut each = pixels.chunks(images::CHANNELS * set.size * set.size);
        let one = |i: &Option<usize>| {
            let (item, picture) = ((*i)?, each.next()?);
            Some((picture.to_vec(), set.classes[set.labels[item] as usize].as_str()))
        };
        Block { heading, pictures: chosen.iter().map(one).collect(), columns }
    };
    let mut blocks = vec![block("as they are", &pixels.concat())];
    if split == Split::Train.name() {
        blocks.push(block("as training sees them", &augmented(&pixels.concat(), set.size, least_area, mirror, seed)?));
    }
    let sheet = images::sheet(&blocks, set.size);
    let mut png = std::io::Cursor::new(vec![]);
    sheet.write_to(&mut png, image::ImageFormat::Png)?;
    write_bytes(&out, png.get_ref())?;
    out!("{}: from {} pictures of the {split} split, in the order {}", out.display(), set.len(), set.classes.join(", "));
    Ok(ExitCode::SUCCESS)
}

/// Pictures [n, 3, size, size] as a step of training would draw them.
fn augmented(pictures: &[u8], size: usize, least_area: f32, mirror: bool, seed: u64) -> Result<Vec<u8>> {
    let n = pictures.len() / (images::CHANNELS * size * size);
    let r = Recorder::new();
    let set = r.feed("pictures", &[n, images::CHANNELS, size, size], DType::U8);
    let (index, rng) = (r.feed("index", &[n], DType::I32), r.feed("rng", &[4], DType::I32));
    r.output("seen", augmented_pictures(set, index, rng, least_area, mirror));
    let mut s = Session::new(&Device::cpu(Cpu::all_cores()), &Switches::default(), seed);
    s.load("augment", r.finish())?;
    let index: Vec<i32> = (0..n as i32).collect();
    s.run("augment", &[("pictures", Data::U8(pictures)), ("index", Data::I32(&index)), ("rng", Data::I32(&rng_feed(seed, 0, 0)))])?;
    Ok(s.read("augment", "seen")?.into_iter().map(|v| ((v + 1.0) * 127.5).round() as u8).collect())
}

/// The first recipe that reads such data.
fn reader<'a>(recipes: Recipes<'a>, data: Reads) -> Option<&'a dyn Recipe> {
    recipes.iter().find(|r| r.reads().contains(&data)).copied()
}

/// Pixels a side that training reads a folder's pictures with, where nothing else is asked for.
fn trained_size(folder: &Path, recipes: Recipes) -> Result<usize> {
    let Some(recipe) = reader(recipes, Reads::Pictures) else { return Ok(images::SIZE) };
    let mut config = recipe::preset(recipe, None)?;
    config.set_value("data.path", folder.display().to_string().into())?;
    // What cannot be read is for whoever reads the pictures to say.
    let size = recipe.sized(&config).ok().and_then(|c| c.value("model", "image")?.as_integer());
    Ok(size.map_or(images::SIZE, |size| size as usize))
}

/// Conversations are trained on as they are, without being prepared.
fn inspect_chats(paths: &[PathBuf], json: bool, recipes: Recipes) -> Result<Value> {
    let (files, mut count, mut turns) = (chats::list(paths)?.len(), 0, 0);
    let layout = chats::each_conversation(paths, None, &mut |_, conversation| {
        count += 1;
        turns += conversation.messages.len();
        Ok(())
    })?;
    let value = serde_json::json!({ "layout": layout.to_string(), "files": files, "conversations": count, "turns": turns });
    if json {
        return Ok(value);
    }
    let names: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
    let (shown, files) = (
        names.iter().map(|name| quoted(name)).collect::<Vec<_>>().join(" "),
        if files == 1 { String::new() } else { format!(" in {files} files") },
    );
    out!("{}: {layout}; {count} conversations{files}, {turns} turns", listed(&names));
    out!("see what is learned of them with: kiln data preview --data {shown} --base FOLDER (a model's)");
    if let Some(recipe) = reader(recipes, Reads::Replies) {
        out!("fine-tune a model on them with: kiln train {} --base FOLDER --data {shown}", recipe.name());
    }
    Ok(value)
}

fn inspect_images(path: &Path, format: Format, json: bool, recipes: Recipes) -> Result<Value> {
    let found = images::inspect(path, format, trained_size(path, recipes)?)?;
    let value = serde_json::to_value(&found)?;
    if json {
        return Ok(value);
    }
    let (train, val) = (&found.train, &found.val);
    out!("{}: {}, {} classes, read as {}x{} pixels", path.display(), found.format, found.classes.len(), found.size, found.size);
    out!("train {} pictures (fingerprint {:016x})", train.pictures, train.fingerprint);
    out!("validation {} pictures (fingerprint {:016x})", val.pictures, val.fingerprint);
    if let Some(test) = &found.test {
        out!("test {} pictures (fingerprint {:016x})", test.pictures, test.fingerprint);
    }
    let width = found.classes.iter().map(|c| c.name.chars().count()).max().unwrap_or(0);
    for c in &found.classes {
        let test = c.test.map_or(String::new(), |n| format!("  test {n:>6}"));
        out!("  {:width$}  train {:>6}  validation {:>6}{test}", c.name, c.train, c.val);
    }
    if let Some(recipe) = reader(recipes, Reads::Pictures) {
        out!("train on it with: kiln train {} --data {}", recipe.name(), quoted(&path.display().to_string()));
    }
    Ok(value)
}
