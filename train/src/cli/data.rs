use super::write_json;
use ::train::data::{Input, PrepareOptions, inspect, prepare};
use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Args)]
#[command(after_help = "Examples:
  kiln data prepare book.txt --out data/book
  kiln data inspect data/book")]
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
  kiln data inspect data/book/train-00000.tokens --json")]
    Inspect {
        path: PathBuf,
        /// Prints JSON
        #[arg(long)]
        json: bool,
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
    }
    Ok(ExitCode::SUCCESS)
}
