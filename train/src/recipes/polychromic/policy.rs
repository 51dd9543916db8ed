//! The task: supervised training, and every few steps replies that are written, embedded and rewarded where a set of them differs.

use super::{Objective, Replies};
use crate::config::{ConfigError, TrainConfig};
use crate::data::Split;
use crate::data::replies::Asked;
use crate::models::decoder::{Adapted, Decoder, DecoderModel, READ, Rows, WRITE, WRITES, Writer, Written, made_up};
use crate::models::{Encoder, EncoderFeeds};
use crate::recipe::{Better, Counted, Evaluation, Extent, Metric, Model, Pending, Session, Supervised, Task, TrainError, Unit};
use crate::run::write_whole;
use crate::variety;
use engine::ops::concat::concat;
use engine::philox::rng_feed;
use engine::{DType, Data, Graph, Init, Recorder, Var};
use serde::Serialize;
use std::path::Path;
use std::sync::Once;

/// How replies are written, embedded and rewarded.
pub struct Policy {
    pub objective: Objective,
    pub writer: Writer,
    encoder: Option<Encoder>,
    width: usize,
    /// Whether the warning that the encoder cuts replies was printed.
    cut: Once,
}

/// As `WRITES`, for the replies that evaluation writes.
const SURVEYS: u32 = WRITES + 1;

pub const METRICS: &[Metric] = &[
    Metric::new(
        "loss",
        Unit::Nats,
        Better::Lower,
        "cross-entropy of the next token of the replies to learn; in training the weighted loss of the policy gradient is added",
    ),
    Metric::perplexity("loss"),
    Metric::new(
        "policy",
        Unit::None,
        Better::Lower,
        "loss of the policy gradient, which rewards sets of replies that differ more than usual",
    ),
    Metric::new("baseline", Unit::None, Better::Neither, "moving mean of diversity, which a set of replies is compared with"),
    Metric::new("diversity", Unit::None, Better::Higher, "mean distance of the embeddings of a prompt's replies, pair by pair"),
    Metric::new("diversity_error", Unit::None, Better::Lower, "standard error of diversity"),
    Metric::new(
        "distinct_2",
        Unit::Share,
        Better::Higher,
        "of the pairs of tokens in a prompt's replies, those that differ from each other",
    ),
    Metric::new("self_bleu", Unit::Share, Better::Lower, "BLEU-4 of each reply against the others to its prompt"),
    Metric::new("pass_1", Unit::Share, Better::Higher, "chance that a reply is right"),
    Metric::new("pass_2", Unit::Share, Better::Higher, "chance that one of two replies is right"),
    Metric::new("pass_4", Unit::Share, Better::Higher, "chance that one of four replies is right"),
    Metric::new("pass_8", Unit::Share, Better::Higher, "chance that one of eight replies is right"),
];

/// What a step with replies reports in addition to the loss.
const SAID: &[&str] = &["policy", "diversity", "baseline"];

impl Policy {
    pub fn new(objective: Objective, model: &DecoderModel) -> Result<Policy, TrainError> {
        let lessons = &model.lessons;
        if lessons.prompts(Split::Train) == 0 || objective.eval_prompts > 0 && lessons.prompts(Split::Val) == 0 {
            return Err(TrainError::Other(
                "the data has no prompts that replies could be written to: with plain text, set objective.weight=0 and objective.eval_prompts=0".into(),
            ));
        }
        let longest = lessons.longest_prompt()?;
        let time = if objective.prompt_tokens == 0 { longest } else { objective.prompt_tokens };
        let invalid = |m: String| TrainError::from(ConfigError::Invalid(m));
        if time < longest {
            return Err(invalid(format!("objective.prompt_tokens = {time}: the longest prompt has {longest} tokens")));
        }
        let context = model.model.shape.context;
        if time + objective.new_tokens > context {
            return Err(invalid(format!(
                "objective.new_tokens = {}: prompts of up to {time} tokens leave {} of the model's {context} positions",
                objective.new_tokens,
                context.saturating_sub(time)
            )));
        }
        let encoder = match objective.encoder.as_str() {
            "" => None,
            path => Some(Encoder::open(Path::new(path))?),
        };
        let writer = Writer { time, stop: lessons.stop()?, ..objective.writer() };
        let width = encoder.as_ref().map_or(model.model.shape.dim, |e| e.shape.dim);
        Ok(Policy { objective, writer, encoder, width, cut: Once::new() })
    }

    /// [rows, tokens] of the replies with their prompts.
    fn rows(&self) -> [usize; 2] {
        [self.writer.rows(), self.writer.capacity()]
    }

    fn embeddings<'g>(&self, r: &'g Recorder) -> Var<'g> {
        let shape = [self.writer.prompts, self.writer.replies, self.width];
        r.state("scratch/embeddings", &shape, DType::F32, Init::Full(0.0))
    }

    /// Tokens of an encoder's row; its tokenizer splits words about as finely as the decoder's.
    fn encoder_time(&self, encoder: &Encoder) -> usize {
        encoder.longest.min(2 * self.writer.new_tokens + 2)
    }

    /// Embeds replies: by the encoder, or by the base as it is without adapters.
    fn embed_graph(&self, model: &Adapted) -> Graph {
        let r = Recorder::new();
        let embedded = match &self.encoder {
            Some(encoder) => encoder.embed(&r, &EncoderFeeds::new(&r, self.writer.rows(), self.encoder_time(encoder))),
            None => Replies::fed(&r, &self.rows()).mean_hidden(&Decoder { lora: None, ..model.decoder(&r, None) }),
        };
        let state = self.embeddings(&r);
        let embedded = r.typed(|| embedded.cast(DType::F32).reshape(&state.shape()));
        r.output("diversity", r.typed(|| embedded.diversity()));
        if !self.objective.eval_file.is_empty() {
            r.output("pairs", r.typed(|| embedded.pair_distances()));
        }
        r.update(state, embedded);
        r.finish()
    }

    /// The programs that write replies and embed them.
    pub fn graphs(&self, model: &Adapted) -> Vec<(&'static str, Graph)> {
        let mut all = self.writer.graphs(|r| model.decoder(r, None));
        all.push(("embed", self.embed_graph(model)));
        all
    }

    /// The policy gradient's loss for the replies that were embedded last, and the baseline's next value.
    fn loss<'g>(&self, r: &'g Recorder, model: &Adapted) -> Var<'g> {
        let decay = self.objective.baseline_decay as f32;
        let (scores, mean, baseline) = r.typed(|| {
            let [baseline, seen] = ["baseline", "baseline_seen"].map(|name| r.state(name, &[1], DType::F32, Init::Full(0.0)));
            let scores = self.embeddings(r).diversity();
            let mean = scores.mean_axis(0);
            // The first time it is what is seen.
            let used = seen.less(r.full(&[1], 0.5)).choose(mean, baseline);
            r.update(baseline, mean.is_finite().choose(used * decay + mean * (1.0 - decay), used));
            r.update(seen, r.full(&[1], 1.0));
            (scores, mean, used)
        });
        let loss = Replies::fed(r, &self.rows()).policy_loss(&model.decoder(r, None), scores, baseline);
        let said = [loss, mean, baseline].map(|v| v.cast(DType::F32).reshape(&[1]));
        r.output("said", concat(&said, 0));
        loss * self.objective.weight as f32
    }

    /// Writes replies and embeds them.
    pub fn write(&self, s: &mut Session, model: &DecoderModel, asked: &Asked, rng: [i32; 4]) -> Result<(Written, SetFeeds), TrainError> {
        let written = self.writer.write(s, asked, rng)?;
        let places = Rows::padded(&written.real, self.writer.capacity());
        let feeds = SetFeeds { ids: written.ids.clone(), reply: written.reply.iter().map(|&r| r as u8).collect(), places };
        match &self.encoder {
            None => s.run("embed", &feeds.feeds())?,
            Some(encoder) => {
                let texts = written.tokens.iter().map(|t| model.lessons.text(t)).collect::<Result<Vec<_>, _>>()?;
                let t = encoder.texts(&texts, Some(self.encoder_time(encoder)))?;
                if t.cut > 0 {
                    let (cut, all, time) = (t.cut, texts.len(), t.time);
                    self.cut.call_once(|| crate::warn!("{cut} of {all} replies have more than {time} tokens of the encoder's: their ends do not count as different (said once)"));
                }
                let feeds =
                    [("encoder_ids", Data::I32(&t.ids)), ("encoder_until", Data::I32(&t.until)), ("encoder_share", Data::F32(&t.share))];
                s.run("embed", &feeds)?;
            }
        }
        Ok((written, feeds))
    }

    /// What replies to `prompts` of the prompts to validate with are like, or to all of them where there are fewer: a prompt that is asked again says
    /// nothing about others, and a standard error that counts it twice is too small.
    pub fn survey(&self, s: &mut Session, model: &DecoderModel, prompts: u64, seed: u64) -> Result<Survey, TrainError> {
        let mut survey = Survey::default();
        let (lessons, batch) = (&model.lessons, self.writer.prompts as u64);
        let prompts = prompts.min(lessons.prompts(Split::Val));
        for first in (0..prompts).step_by(self.writer.prompts) {
            s.go_on()?;
            let asked = lessons.ask(Split::Val, first..first + batch, self.writer.time)?;
            let (written, _) = self.write(s, model, &asked, rng_feed(seed, first, SURVEYS))?;
            let scores = s.read("embed", "diversity")?;
            let pairs = match self.objective.eval_file.as_str() {
                "" => vec![],
                _ => s.read("embed", "pairs")?,
            };
            let sets = asked.prompts.iter().zip(written.tokens.chunks(self.writer.replies)).zip(scores).enumerate();
            for (i, ((prompt, tokens), score)) in sets.take((prompts - first) as usize) {
                let replies = tokens.iter().map(|t| lessons.text(t)).collect::<Result<Vec<_>, _>>()?;
                let right = replies.iter().map(|t| lessons.is_right(&prompt.text, t)).collect();
                let pairs = pairs.chunks((pairs.len() / self.writer.prompts).max(1)).nth(i).unwrap_or_default().to_vec();
                survey.add(tokens, SetOfReplies { prompt: prompt.text.clone(), replies, diversity: score as f64, pairs, right });
            }
        }
        Ok(survey)
    }
}

/// The feeds of `Replies`.
pub struct SetFeeds {
    ids: Vec<i32>,
    reply: Vec<u8>,
    places: Rows,
}

impl SetFeeds {
    fn feeds(&self) -> [(&'static str, Data<'_>); 4] {
        [
            ("set_ids", Data::I32(&self.ids)),
            ("set_reply", Data::U8(&self.reply)),
            ("set_position", Data::I32(&self.places.position)),
            ("set_until", Data::I32(&self.places.until)),
        ]
    }
}

/// A prompt, its replies, and how different they are.
#[derive(Clone, Debug, Serialize)]
pub struct SetOfReplies {
    pub prompt: String,
    pub replies: Vec<String>,
    pub diversity: f64,
    /// Distances of replies 0 and 1, 0 and 2, .., 1 and 2, ..; where they were asked for.
    pub pairs: Vec<f32>,
    /// Whether each is right, where that can be told.
    pub right: Option<Vec<bool>>,
}

/// What sets of replies are like.
#[derive(Clone, Debug, Default)]
pub struct Survey {
    pub sets: Vec<SetOfReplies>,
    distinct: Vec<f64>,
    self_bleu: Vec<f64>,
}

/// k of the pass@k that evaluation reports.
const PASSES_AT: [(&str, usize); 4] = [("pass_1", 1), ("pass_2", 2), ("pass_4", 4), ("pass_8", 8)];

impl Survey {
    fn add(&mut self, tokens: &[Vec<u32>], set: SetOfReplies) {
        self.distinct.extend(variety::distinct(tokens, 2));
        self.self_bleu.extend(variety::self_bleu(tokens));
        self.sets.push(set);
    }

    /// A line of JSON a set.
    fn write(&self, path: &Path) -> Result<(), TrainError> {
        let line = |set: &SetOfReplies| serde_json::to_string(set).expect("plain values") + "\n";
        write_whole(path, &self.sets.iter().map(line).collect::<String>())
    }

    /// The mean diversity, and its standard error.
    pub fn diversity(&self) -> (f64, f64) {
        let scores: Vec<f64> = self.sets.iter().map(|s| s.diversity).collect();
        let (n, m) = (scores.len() as f64, mean(&scores));
        let variance = scores.iter().map(|s| (s - m).powi(2)).sum::<f64>()
            / (n - engine::mutant!("standard-error-of-all-there-are", 1.0, 0.0)).max(1.0);
        (m, engine::mutant!("standard-error-without-its-root", (variance / n).sqrt(), variance / n))
    }

    pub fn values(&self) -> Vec<(&'static str, f64)> {
        let (diversity, error) = self.diversity();
        let mut all = vec![("diversity", diversity)];
        all.extend((self.sets.len() > 1).then_some(("diversity_error", error)));
        let means = [("distinct_2", &self.distinct), ("self_bleu", &self.self_bleu)];
        all.extend(means.into_iter().filter(|(_, v)| !v.is_empty()).map(|(name, v)| (name, mean(v))));
        for (name, k) in PASSES_AT {
            let passed = |right: &Vec<bool>| {
                variety::pass_at(engine::mutant!("pass-at-4-is-of-2", k, k.min(2)), right.len(), right.iter().filter(|r| **r).count())
            };
            let each: Vec<f64> = self.sets.iter().filter_map(|s| s.right.as_ref().and_then(passed)).collect();
            all.extend((!each.is_empty()).then(|| (name, mean(&each))));
        }
        all
    }
}

fn mean(v: &[f64]) -> f64 {
    v.iter().sum::<f64>() / v.len().max(1) as f64
}

pub struct Polychromic {
    inner: Supervised<DecoderModel>,
    policy: Option<Policy>,
    seed: u64,
    /// Whether the last step had replies.
    wrote: bool,
}

impl Polychromic {
    pub fn new(mut model: DecoderModel, objective: Objective, train: TrainConfig, seed: u64) -> Result<Polychromic, TrainError> {
        let policy = objective.writes().then(|| Policy::new(objective, &model)).transpose()?;
        // Where nothing is learned from what it embeds, it may change.
        if let Some(encoder) = policy.as_ref().filter(|p| p.objective.weight > 0.0).and_then(|p| p.encoder.as_ref()) {
            model.identity["encoder"] = format!("{:016x}", encoder.fingerprint()?).into();
        }
        Ok(Polychromic { inner: Supervised::new(model, train, seed), policy, seed, wrote: false })
    }

    /// The policy of a step, where it has one.
    fn at(&self, step: u64) -> Option<&Policy> {
        self.policy.as_ref().filter(|p| p.objective.weight > 0.0 && step.is_multiple_of(p.objective.every))
    }
}

impl Task for Polychromic {
    fn train_config(&self) -> &TrainConfig {
        self.inner.train_config()
    }

    fn graphs(&self) -> Vec<(&'static str, Graph)> {
        let mut all = self.inner.graphs();
        let Some(policy) = &self.policy else { return all };
        let model = &self.inner.model;
        all.extend(policy.graphs(&model.model));
        if policy.objective.weight > 0.0 {
            let (batch, one) = (self.train_config().batch, self.train_config().accumulate == 1);
            all.push((
                "policy",
                match one {
                    true => self.inner.step_graph(|r| {
                        let supervised = model.loss(r, batch)[0].1;
                        vec![("loss", supervised + policy.loss(r, &model.model))]
                    }),
                    false => self.inner.micro_graph(|r| vec![("loss", policy.loss(r, &model.model))]),
                },
            ));
        }
        all
    }

    fn runs(&self, program: &str) -> f64 {
        let Some(policy) = &self.policy else { return self.inner.runs(program) };
        // Without a weight, replies are written for the evaluation only.
        let often = if policy.objective.weight > 0.0 { 1.0 / policy.objective.every as f64 } else { 0.0 };
        match program {
            READ | "embed" | "policy" => often,
            WRITE => often * (policy.writer.new_tokens - 1) as f64,
            // `policy` takes its place.
            "train" => 1.0 - often,
            _ => self.inner.runs(program),
        }
    }

    fn again(&self, program: &str) -> Option<&'static str> {
        self.inner.again(program)
    }

    fn follows(&self, program: &str) -> Option<&'static str> {
        (program == WRITE).then_some(READ)
    }

    fn phase<'a>(&self, program: &'a str) -> &'a str {
        match program {
            READ | WRITE => "generation",
            "embed" => "diversity",
            "policy" => "policy",
            "update" => "update",
            _ => "supervised",
        }
    }

    fn settle(&self, free: Option<u64>) {
        self.inner.settle(free)
    }

    fn prepare(&self, s: &mut Session) -> Result<(), TrainError> {
        self.inner.prepare(s)?;
        match self.policy.as_ref().and_then(|p| p.encoder.as_ref()) {
            Some(encoder) => Ok(encoder.load(&mut s.store)?),
            None => Ok(()),
        }
    }

    fn init_from(&self, s: &mut Session, from: &Path) -> Result<bool, TrainError> {
        self.inner.init_from(s, from)
    }

    fn begin(&mut self, done: u64) -> Result<(), TrainError> {
        self.inner.begin(done)
    }

    fn step(&mut self, s: &mut Session, step: u64, rate: f64) -> Result<(), TrainError> {
        let Some(policy) = self.at(step) else {
            self.wrote = false;
            return self.inner.step(s, step, rate);
        };
        let (model, prompts) = (&self.inner.model, policy.writer.prompts as u64);
        let first = engine::mutant!("every-step-asks-the-same", step / policy.objective.every * prompts, 0);
        let asked = model.lessons.ask(Split::Train, first..first + prompts, policy.writer.time)?;
        let rng = rng_feed(self.seed, engine::mutant!("every-step-draws-the-same-replies", step, 0), WRITES);
        let (_, set) = policy.write(s, model, &asked, rng)?;
        self.wrote = true;
        self.inner.step_with(s, step, rate, Some(("policy", &set.feeds())))
    }

    fn report(&self, s: &Session) -> Result<Pending, TrainError> {
        match self.wrote {
            true => Ok(self.inner.report_of(s, "policy")?.beside(SAID, s.programs["policy"].start_read("said", &s.store)?)),
            false => self.inner.report(s),
        }
    }

    fn evaluate(&mut self, s: &mut Session) -> Result<Evaluation, TrainError> {
        let mut found = self.inner.evaluate(s)?;
        if let Some(policy) = self.policy.as_ref().filter(|p| p.objective.eval_prompts > 0) {
            let survey = policy.survey(s, &self.inner.model, policy.objective.eval_prompts, self.seed)?;
            found.values.extend(survey.values());
            found.counted = Some(Counted { what: "prompts", evaluated: survey.sets.len(), left_out: vec![] });
            if !policy.objective.eval_file.is_empty() {
                survey.write(Path::new(&policy.objective.eval_file))?;
            }
        }
        Ok(found)
    }

    fn metrics(&self) -> &'static [Metric] {
        METRICS
    }

    fn extent(&self) -> Result<Option<Extent>, TrainError> {
        self.inner.extent()
    }

    fn without_validation(&self) -> Result<Option<String>, TrainError> {
        self.inner.without_validation()
    }

    fn limit_evaluation(&mut self, batches: u64) {
        self.inner.limit_evaluation(batches)
    }

    fn epoch(&self) -> Option<u64> {
        self.inner.epoch()
    }

    fn work(&self) -> (&'static str, f64) {
        self.inner.work()
    }

    fn period(&self) -> usize {
        self.policy.as_ref().filter(|p| p.objective.weight > 0.0).map_or(1, |p| p.objective.every as usize)
    }

    fn bench_step(&mut self, s: &mut Session, step: u64) -> Result<(), TrainError> {
        let Some(policy) = self.at(step) else {
            self.wrote = false;
            return self.inner.bench_step(s, step);
        };
        let asked = made_up(&policy.writer, self.inner.model.vocab());
        let (_, set) = policy.write(s, &self.inner.model, &asked, rng_feed(self.seed, step, WRITES))?;
        self.wrote = true;
        self.inner.bench_step_with(s, step, Some(("policy", &set.feeds())))
    }

    fn floor(&self) -> Option<(&'static str, f64)> {
        self.inner.floor()
    }

    fn show(&mut self, s: &mut Session) -> Result<Option<String>, TrainError> {
        let Some(policy) = &self.policy else { return self.inner.show(s) };
        let model = &self.inner.model;
        if model.lessons.prompts(Split::Val) == 0 {
            return Ok(None);
        }
        let after = policy.survey(s, model, SHOWN, self.seed)?;
        // Adapters add nothing where B is zero: that is the model before.
        let ours: Vec<(String, engine::Meta, Vec<u8>)> = s
            .store
            .iter()
            .filter(|(name, _)| name.ends_with(".lora_b"))
            .map(|(name, t)| Ok((name.to_string(), t.meta.clone(), t.bytes()?.into_owned())))
            .collect::<Result<_, engine::Error>>()?;
        for (name, meta, bytes) in &ours {
            s.store.set(name, meta, &vec![0; bytes.len()])?;
        }
        let before = policy.survey(s, model, SHOWN, self.seed);
        for (name, meta, bytes) in &ours {
            s.store.set(name, meta, bytes)?;
        }
        let before = before?;
        let mut text = String::new();
        for (then, now) in before.sets.iter().zip(&after.sets).take(3) {
            text += &format!("{}\n  before: {}\n  after:  {}\n", then.prompt, then.replies.join(" | "), now.replies.join(" | "));
        }
        let [(then, _), (now, error)] = [before.diversity(), after.diversity()];
        let asked = after.sets.len();
        text += &format!(
            "diversity of replies to {asked} prompts: {then:.4} before (the base alone), {now:.4} after (standard error {error:.4})"
        );
        Ok(Some(text))
    }

    fn identity(&self) -> Result<serde_json::Value, TrainError> {
        self.inner.identity()
    }

    fn paths(&self) -> &'static [(&'static str, &'static str)] {
        &[("data.path", "data"), ("model.base", "base"), ("objective.encoder", "encoder")]
    }

    fn kept(&self) -> Result<Vec<(&'static str, Vec<u8>)>, TrainError> {
        self.inner.kept()
    }
}

/// The most prompts whose replies are looked at when training ends.
const SHOWN: u64 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    /// Three sets, worked out by hand.
    #[test]
    fn a_survey_says_what_its_sets_are_like() {
        let set = |diversity: f64, right: &[u8]| SetOfReplies {
            prompt: String::new(),
            replies: vec![],
            diversity,
            pairs: vec![],
            right: Some(right.iter().map(|r| *r == 1).collect()),
        };
        let mut survey = Survey::default();
        // Pairs of tokens that differ: 2 of 4, 4 of 4, 2 of 2.
        survey.add(&[vec![1, 2, 3], vec![1, 2, 3]], set(0.1, &[1, 0, 0, 0]));
        survey.add(&[vec![1, 2, 3], vec![4, 5, 6]], set(0.2, &[1, 1, 0, 0]));
        survey.add(&[vec![1, 2], vec![2, 1]], set(0.6, &[0, 0, 0, 0]));
        let values: std::collections::BTreeMap<&str, f64> = survey.values().into_iter().collect();
        // Deviations of -0.2, -0.1 and 0.3: a variance of 0.14 / 2, of the mean a third of that.
        // One of four right: two of them hold it in 3 of 6 ways. Two of four: in 5 of 6.
        let wanted = [
            ("diversity", 0.3),
            ("diversity_error", (0.07f64 / 3.0).sqrt()),
            ("distinct_2", (0.5 + 1.0 + 1.0) / 3.0),
            ("pass_1", (0.25 + 0.5) / 3.0),
            ("pass_2", (0.5 + 5.0 / 6.0) / 3.0),
            ("pass_4", 2.0 / 3.0),
        ];
        for (name, value) in wanted {
            assert!((values[name] - value).abs() < 1e-12, "{name}: {values:?}");
        }
        assert!(!values.contains_key("pass_8"), "there are four replies: {values:?}");
    }
}
