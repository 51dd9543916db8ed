//! `kiln generate --prompts`: the prompts of a file or of stdin, and what a model writes to each, as a line of JSON.

use super::generate::GenerateArgs;
use super::progress::Progress;
use crate::data::chats::{Layout, Message};
use crate::models::decoder::{Chat, Said};
use crate::recipe::{Generator, Replier, Session};
use crate::sample::{self, Sampling, continue_text};
use anyhow::{Result, anyhow, bail};
use serde_json::{Map, Value};
use std::path::Path;
use std::process::ExitCode;

/// What a model is asked.
enum Asked {
    Text(String),
    Turns(Vec<Message>),
}

/// A prompt, and where it stands.
struct Row {
    place: String,
    asked: Asked,
    /// The row as it is written out again, with what the model wrote.
    object: Map<String, Value>,
}

impl Row {
    fn of_text(place: String, text: &str) -> Row {
        let object = Map::from_iter([("prompt".to_string(), text.into())]);
        Row { place, asked: Asked::Text(text.into()), object }
    }

    /// A row of JSON: a `prompt`, or the turns of a conversation in `messages`.
    fn of_object(place: String, object: Map<String, Value>) -> Result<Row> {
        let has = |name: &str| object.contains_key(name);
        let asked = match (has("prompt"), has("messages")) {
            (true, false) => match &object["prompt"] {
                Value::String(text) => Asked::Text(text.clone()),
                other => bail!("{place}: its prompt is {other:.40}, not a text"),
            },
            (false, true) => Asked::Turns(turns(&object).map_err(|problem| anyhow!("{place}: {problem}"))?),
            (true, true) => bail!("{place}: it has a prompt and messages: leave one of them"),
            (false, false) => {
                let names: Vec<&String> = object.keys().collect();
                bail!("{place}: it has neither \"prompt\" nor \"messages\", only {names:?}")
            }
        };
        Ok(Row { place, asked, object })
    }

    /// A line of JSON: `text`, or `texts` where there are several.
    fn line(&mut self, mut texts: Vec<String>) -> String {
        let mut object = std::mem::take(&mut self.object);
        match texts.len() {
            1 => object.insert("text".into(), texts.remove(0).into()),
            _ => object.insert("texts".into(), texts.into()),
        };
        Value::Object(object).to_string()
    }
}

fn turns(object: &Map<String, Value>) -> Result<Vec<Message>, String> {
    let layout = Layout::named("messages").expect("it is known");
    let row = serde_json::from_value(Value::Object(object.clone())).map_err(|e| e.to_string())?;
    let conversation = layout.conversation(&row)?;
    match conversation.messages.last() {
        _ if conversation.tools.is_some() => Err("its tools are not put to the model here (remove \"tools\")".into()),
        Some(last) if last.is_assistant() => Err("its last turn is the assistant's: there is nothing to reply to".into()),
        _ => Ok(conversation.messages),
    }
}

/// The prompts of the command line: of a file, or the one.
fn rows(a: &GenerateArgs) -> Result<Vec<Row>> {
    let Some(path) = &a.prompts else { return Ok(vec![Row::of_text("--prompt".into(), &a.prompt)]) };
    let (name, text) = match path == Path::new("-") {
        true => ("stdin".into(), std::io::read_to_string(std::io::stdin())),
        false => (path.display().to_string(), crate::input::read_to_string(path)),
    };
    let text = text.map_err(|e| anyhow!("cannot read {name}: {e}"))?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    let lines: Vec<(usize, &str)> = (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()).collect();
    let object = |line: &str| serde_json::from_str::<Map<String, Value>>(line);
    let called = path.extension().is_some_and(|e| ["jsonl", "ndjson"].iter().any(|own| e.eq_ignore_ascii_case(own)));
    let (Some((_, first)), place) = (lines.first(), |n: usize| format!("{name}, line {n}")) else {
        bail!("{name} holds no prompts: write one a line, or lines of JSON with a \"prompt\" or \"messages\"")
    };
    if !called && object(first).is_err() {
        return Ok(lines.into_iter().map(|(n, line)| Row::of_text(place(n), line)).collect());
    }
    let row = |(n, line): (usize, &str)| match object(line) {
        Ok(object) => Row::of_object(place(n), object),
        Err(e) => bail!("{}: not a JSON object: {e}", place(n)),
    };
    lines.into_iter().map(row).collect()
}

/// Replies of a model to all prompts, several at a time; `fill` gives it its weights.
pub fn reply(
    a: &GenerateArgs,
    chat: &Chat,
    s: &mut Session,
    sampling: &Sampling,
    fill: impl FnOnce(&mut Session) -> Result<()>,
) -> Result<ExitCode> {
    let mut rows = rows(a)?;
    // What cannot be asked is said before anything is written.
    let tokens = |row: &Row| {
        let one;
        let said = match &row.asked {
            Asked::Text(text) if a.raw => Said::Raw(text),
            Asked::Turns(_) if a.raw => bail!("{}: it has messages, and --raw continues a text as it is", row.place),
            Asked::Turns(_) if chat.continues() => bail!("{}: it has messages, and the model no chat template for them", row.place),
            Asked::Text(text) => {
                one = a.first_turn().into_iter().chain([Message::new("user", text)]).collect::<Vec<_>>();
                Said::Turns { messages: &one, think: a.think }
            }
            Asked::Turns(turns) => {
                let first = a.first_turn().filter(|_| turns[0].role != "system");
                one = first.into_iter().chain(turns.iter().cloned()).collect::<Vec<_>>();
                Said::Turns { messages: &one, think: a.think }
            }
        };
        chat.ask(said).map_err(|e| anyhow!("{}: {e}", row.place))
    };
    let prompts = rows.iter().map(tokens).collect::<Result<Vec<_>>>()?;
    let replies = a.replies as usize;
    let batches = chat.batches(&prompts, (a.at_once as usize / replies).max(1), sampling.max_tokens);
    let (mut fill, mut last, mut progress) = (Some(fill), None, Progress::new());
    let mut written: Vec<Option<Vec<String>>> = prompts.iter().map(|_| None).collect();
    let (mut done, mut shown) = (0, 0);
    for (batch, draw) in batches.iter().zip(0..) {
        let talk = chat.begin_batch(s, (batch, draw), &prompts, (replies, sampling), last.as_ref())?;
        fill.take().map_or(Ok(()), |fill| fill(s))?;
        let texts = talk.write(s, &mut |_| {})?;
        // After a template a reply is what stands between white space.
        let whole = |text: &String| if a.raw || chat.continues() { text.clone() } else { text.trim().into() };
        for (place, texts) in batch.prompts.iter().zip(texts.chunks(replies)) {
            written[*place] = Some(texts.iter().map(whole).collect());
        }
        done += batch.prompts.len();
        while let Some(texts) = written.get_mut(shown).and_then(Option::take) {
            out_json!(rows[shown].line(texts));
            shown += 1;
        }
        progress.say(format!("{done} of {} prompts", prompts.len()));
        last = Some(talk);
    }
    progress.end();
    Ok(ExitCode::SUCCESS)
}

/// What a model that continues texts writes behind each prompt, one after another.
pub fn go_on(a: &GenerateArgs, generator: &mut dyn Generator, s: &mut Session, sampling: &Sampling) -> Result<ExitCode> {
    let rows = rows(a)?;
    let (all, mut progress) = (rows.len(), Progress::new());
    let text_of = |row: &Row| match &row.asked {
        Asked::Text(text) => Ok(text.clone()),
        Asked::Turns(_) => bail!("{}: it has messages, and this model continues texts", row.place),
    };
    let texts = rows.iter().map(text_of).collect::<Result<Vec<_>>>()?;
    for (i, (mut row, text)) in rows.into_iter().zip(texts).enumerate() {
        let sampling = Sampling { seed: sampling.seed.wrapping_add(i as u64), ..sampling.clone() };
        let mut written = String::new();
        continue_text(generator, s, &text, &sampling, &mut |piece| written += piece).map_err(|e| anyhow!("{}: {e}", row.place))?;
        out_json!(row.line(vec![written]));
        progress.say(format!("{} of {all} prompts", i + 1));
    }
    progress.end();
    Ok(ExitCode::SUCCESS)
}

/// Replies of a model that reads a prompt and writes with a decoder of its own, several at a time; `fill` gives it its weights.
pub fn answer(
    a: &GenerateArgs,
    replier: &mut dyn Replier,
    s: &mut Session,
    sampling: &Sampling,
    fill: impl FnOnce(&mut Session) -> Result<()>,
) -> Result<ExitCode> {
    let mut rows = rows(a)?;
    let tokens_of = |row: &Row| {
        let turns: Vec<Message> = match &row.asked {
            Asked::Text(text) => a.first_turn().into_iter().chain([Message::new("user", text)]).collect(),
            Asked::Turns(turns) => a.first_turn().filter(|_| turns[0].role != "system").into_iter().chain(turns.iter().cloned()).collect(),
        };
        replier.prompt(&turns).map_err(|e| anyhow!("{}: {e}", row.place))
    };
    let prompts = rows.iter().map(tokens_of).collect::<Result<Vec<_>>>()?;
    if let Some(row) = rows.iter().zip(&prompts).find_map(|(row, tokens)| tokens.is_empty().then_some(row)) {
        bail!("{}: the prompt has no tokens", row.place);
    }
    let replies = a.replies as usize;
    let at_once = (a.at_once as usize / replies).max(1).min(prompts.len());
    replier.begin(s, at_once * replies, sampling.max_tokens)?;
    fill(s)?;
    let (all, mut progress, mut done) = (rows.len(), Progress::new(), 0);
    for (rows, prompts) in rows.chunks_mut(at_once).zip(prompts.chunks(at_once)) {
        let asked: Vec<Vec<u32>> = prompts.iter().flat_map(|p| std::iter::repeat_n(p.clone(), replies)).collect();
        let texts = sample::reply(replier, s, &asked, ((done * replies) as u64, sampling), &mut |_, _| {})?;
        for (row, texts) in rows.iter_mut().zip(texts.chunks(replies)) {
            out_json!(row.line(texts.to_vec()));
        }
        done += rows.len();
        progress.say(format!("{done} of {all} prompts"));
    }
    progress.end();
    Ok(ExitCode::SUCCESS)
}
