use super::write_json;
use ::train::data::images::{self, Format};
use ::train::data::{Dataset, Input, PrepareOptions, Split, inspect, prepare};
use ::train::run::write_bytes;
use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Args)]
#[command(after_help = "Examples:
  kiln data prepare book.txt --out data/book
  kiln data inspect data/book
  kiln data preview --data data/cifar-10-batches-bin --out sheet.png")]
pub struct DataArgs {
    #[command(subcommand)]
    command: DataCommand,
}

#[derive(Subcommand)]
enum DataCommand {
    /// Turns text into memory-mapped token shards
    #[command(after_help = "Examples:
  kiln data prepare book.txt --out data/book
  kiln data prepare a.jsonl b.jsonl --field body --tokenizer tokenizer.json --out data/web
  kiln data prepare --generated 20000 --out data/made")]
    Prepare {
        /// UTF-8 text files, or .jsonl files with one object a line
        files: Vec<PathBuf>,
        /// The field of a JSONL object that holds the text
        #[arg(long, default_value = "text")]
        field: String,
        /// byte, or the path of a tokenizer.json
        #[arg(long, default_value = "byte")]
        tokenizer: String,
        /// The folder to make
        #[arg(long)]
        out: PathBuf,
        /// Share of the documents kept for validation
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
    },
    /// What a data set's folder or a shard holds, and whether it is whole
    #[command(after_help = "Examples:
  kiln data inspect data/book
  kiln data inspect data/book/train-00000.tokens --json
  kiln data inspect data/cifar-10-batches-bin")]
    Inspect {
        path: PathBuf,
        /// Prints JSON
        #[arg(long)]
        json: bool,
    },
    /// Draws a sheet of a set's pictures, a row for each class
    #[command(after_help = "Examples:
  kiln data preview --out sheet.png
  kiln data preview --data data/cifar-10-batches-bin --split val --count 100 --out sheet.png")]
    Preview {
        /// A folder: CIFAR-10 or CIFAR-100 (binary version), or pictures in a folder for each class; or generated
        #[arg(long, default_value = "generated")]
        data: PathBuf,
        /// The PNG file to write
        #[arg(long)]
        out: PathBuf,
        /// The most pictures to show
        #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1000))]
        count: u32,
        #[arg(long, default_value = "train", value_parser = Split::ALL.map(Split::name))]
        split: String,
        /// Decides which pictures are shown, and how generated ones are drawn
        #[arg(long, default_value_t = 0)]
        seed: u64,
        /// cifar-10, cifar-100 or folder; found out if not given
        #[arg(long)]
        format: Option<Format>,
        /// Pixels a side that a folder of pictures is resized to
        #[arg(long, default_value_t = images::SIZE)]
        size: usize,
    },
}

pub fn run(a: DataArgs) -> Result<ExitCode> {
    match a.command {
        DataCommand::Prepare { files, field, tokenizer, out, val_share, shard_tokens, generated, seed, force } => {
            let input = match generated {
                Some(0) => bail!("--generated 0: at least one sentence"),
                Some(sentences) => Input::Generated { seed, sentences },
                None if files.is_empty() => bail!("name at least one text or .jsonl file, or --generated SENTENCES"),
                None => Input::Files { paths: files, field },
            };
            let options = PrepareOptions { val_share, shard_tokens, force, ..PrepareOptions::new(input, &tokenizer, &out) };
            let s = prepare(&options)?;
            let d = &s.dataset;
            out!(
                "{}: {} training and {} validation tokens of {} ({} tokens in its vocabulary)",
                s.out.display(),
                d.train.tokens,
                d.val.tokens,
                d.tokenizer,
                d.vocab
            );
            out!("train on it with: kiln train hydra --data {} --set model.vocab={}", s.out.display(), d.vocab);
        }
        DataCommand::Inspect { path, json } => {
            if let Some(format) = Format::detect(&path).filter(|_| !path.join(Dataset::FILE).exists()) {
                inspect_images(&path, format, json)?;
                return Ok(ExitCode::SUCCESS);
            }
            let found = inspect(&path)?;
            let value = serde_json::to_value(&found)?;
            if json {
                write_json(None, &value)?;
            } else {
                if let Some(d) = &found.dataset {
                    out!("{}: tokenizer {} (fingerprint {:016x}), vocabulary {}", path.display(), d.tokenizer, d.fingerprint, d.vocab);
                    out!(
                        "train {} tokens in {} documents, validation {} in {}",
                        d.train.tokens,
                        d.train.documents,
                        d.val.tokens,
                        d.val.documents
                    );
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
            if found.shards.iter().any(|s| !s.checksum_ok) {
                bail!("{} has corrupted shards", path.display());
            }
        }
        DataCommand::Preview { data, out, count, split, seed, format, size } => {
            let val = split == Split::Val.name();
            let set = if data == Path::new("generated") {
                if format.is_some() || size != images::SIZE {
                    bail!("--format and --size are for folders; generated pictures have {0}x{0} pixels", images::SIZE);
                }
                let split = Split::ALL[usize::from(val)];
                images::generate(seed, split, images::GENERATED[split as usize])
            } else {
                let (train_set, val_set) = images::open(&data, format, size)?;
                if val { val_set } else { train_set }
            };
            let (pictures, columns) = images::by_class(&set, count as usize, seed);
            let sheet = images::sheet(&pictures, set.size, columns);
            let mut png = std::io::Cursor::new(vec![]);
            sheet.write_to(&mut png, image::ImageFormat::Png)?;
            write_bytes(&out, png.get_ref())?;
            out!("{}: from {} pictures of the {split} split, in the order {}", out.display(), set.len(), set.classes.join(", "));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn inspect_images(path: &Path, format: Format, json: bool) -> Result<()> {
    let found = images::inspect(path, format)?;
    if json {
        return write_json(None, &serde_json::to_value(&found)?);
    }
    let (train, val) = (&found.train, &found.val);
    out!("{}: {}, {} classes, read as {}x{} pixels", path.display(), found.format, found.classes.len(), found.size, found.size);
    out!("train {} pictures (fingerprint {:016x})", train.pictures, train.fingerprint);
    out!("validation {} pictures (fingerprint {:016x})", val.pictures, val.fingerprint);
    let width = found.classes.iter().map(|c| c.name.chars().count()).max().unwrap_or(0);
    for c in &found.classes {
        out!("  {:width$}  train {:>6}  validation {:>6}", c.name, c.train, c.val);
    }
    Ok(())
}
