//! How long steps take: by the device's own clock, whole steps alone, without evaluation and saving; and which took far longer than the others, and why.

use crate::recipe::TrainError;
use engine::Device;
use engine::cuda::Moment;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::time::Duration;

/// A step is slow if it takes longer than so many times the median.
const SLOW: f64 = 2.0;
/// As many steps before it, at most, are what a step is compared with.
const RECENT: usize = 101;
/// As many must be known first.
const ENOUGH: usize = 9;

/// What a step runs: noted while it is launched, timed when it is done.
#[derive(Default)]
pub struct Timeline {
    /// Where each program's work begins, in order; the same program again goes on in the same phase.
    phases: Vec<(String, Moment)>,
    flops: u64,
    seen: BTreeSet<String>,
    /// Whether a program ran for the first time: it may have been compiled and captured.
    first: bool,
    /// Whether the next runs are like first ones.
    changed: bool,
}

impl Timeline {
    /// A program is about to be launched.
    pub fn enter(&mut self, program: &str, flops: u64, device: &Device) -> Result<(), TrainError> {
        if self.phases.last().is_none_or(|(last, _)| last != program) {
            self.phases.push((program.into(), Moment::now(device.gpu())?));
            self.first |= self.seen.insert(program.into());
        }
        self.flops += flops;
        Ok(())
    }

    /// The next step is like a first one: a program was replaced by another.
    pub fn changed(&mut self) {
        self.changed = true;
    }

    /// Forgets what ran between steps.
    fn begin(&mut self) {
        self.phases.clear();
        (self.flops, self.first) = (0, std::mem::take(&mut self.changed));
    }
}

/// A step that is under way or done.
struct Launched {
    step: u64,
    begin: Rc<Moment>,
    end: Rc<Moment>,
    phases: Vec<(String, Moment)>,
    flops: u64,
    first: bool,
    waited: Duration,
}

/// Why a step took long.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Cause {
    Data,
    First,
    Host,
    Work,
}

impl Cause {
    fn name(self) -> &'static str {
        match self {
            Cause::Data => "waited for data",
            Cause::First => "ran a program for the first time",
            Cause::Host => "were launched late by the host",
            Cause::Work => "took that long on the device",
        }
    }
}

/// Steps' time from one record to the next.
#[derive(Default, Clone, Debug)]
pub struct Window {
    pub steps: u64,
    pub time: Duration,
    /// Of it, how long the host waited for data.
    pub waited: Duration,
    /// Floating-point operations, without those that are done twice to save memory.
    pub flops: f64,
    /// Time of each part of the steps.
    pub phases: BTreeMap<String, Duration>,
}

impl Window {
    pub fn steps_per_second(&self) -> f64 {
        self.steps as f64 / self.time.as_secs_f64().max(1e-9)
    }

    /// Model FLOPs utilisation: the share that the model's own arithmetic is of `most`, the device's peak in FLOP/s of dense bf16.
    pub fn mfu(&self, most: f64) -> f64 {
        self.flops / engine::mutant!("mfu-of-steps-that-take-a-second", self.time.as_secs_f64(), self.steps as f64).max(1e-9) / most
    }

    /// Milliseconds for each step.
    pub fn ms(&self, time: Duration) -> f64 {
        time.as_secs_f64() * 1e3 / self.steps.max(1) as f64
    }
}

/// What is known of a step that is done.
#[derive(Clone, Copy)]
struct Done {
    seconds: f64,
    waited: f64,
    /// How long the device was idle before it.
    idle: f64,
    first: bool,
}

/// Times steps without waiting for them.
pub struct Clock {
    device: Device,
    /// Where the next step begins: at the end of the one before, unless something else came between.
    next: Option<Rc<Moment>>,
    launched: VecDeque<Launched>,
    window: Window,
    recent: VecDeque<f64>,
    /// The first steps, until there are enough to compare them with.
    unjudged: Vec<Done>,
    /// Steps in all.
    pub steps: u64,
    slow: BTreeMap<Cause, u64>,
}

impl Clock {
    pub fn new(device: &Device) -> Clock {
        Clock {
            device: device.clone(),
            next: None,
            launched: VecDeque::new(),
            window: Window::default(),
            recent: VecDeque::new(),
            unjudged: vec![],
            steps: 0,
            slow: BTreeMap::new(),
        }
    }

    /// A step is about to be launched.
    pub fn begin(&mut self, timeline: &mut Timeline) -> Result<(), TrainError> {
        timeline.begin();
        if self.next.is_none() {
            self.next = Some(Rc::new(Moment::now(self.device.gpu())?));
        }
        Ok(())
    }

    /// It has been launched; the host waited so long for its data.
    pub fn launched(&mut self, step: u64, timeline: &mut Timeline, waited: Duration) -> Result<(), TrainError> {
        let end = Rc::new(Moment::now(self.device.gpu())?);
        let Some(begin) = self.next.replace(end.clone()) else { return Ok(()) };
        let (phases, flops, first) = (std::mem::take(&mut timeline.phases), timeline.flops, timeline.first);
        self.launched.push_back(Launched { step, begin, end, phases, flops, first, waited });
        while self.launched.front().is_some_and(|l| l.end.is_past()) {
            self.take_first()?;
        }
        Ok(())
    }

    /// Something else than steps was done since the last one.
    pub fn pause(&mut self) {
        self.next = None;
    }

    /// The time of the steps up to this one, since the last call; waits for it.
    pub fn up_to(&mut self, step: u64) -> Result<Window, TrainError> {
        while self.launched.front().is_some_and(|l| l.step <= step) {
            self.take_first()?;
        }
        Ok(std::mem::take(&mut self.window))
    }

    fn take_first(&mut self) -> Result<(), TrainError> {
        let Some(l) = self.launched.pop_front() else { return Ok(()) };
        let time = l.end.since(&l.begin)?;
        let idle = l.phases.first().map_or(Ok(Duration::ZERO), |(_, m)| m.since(&l.begin))?;
        for (i, (name, from)) in l.phases.iter().enumerate() {
            let to = l.phases.get(i + 1).map_or(&*l.end, |(_, next)| next);
            *self.window.phases.entry(name.clone()).or_default() += to.since(from)?;
        }
        self.window.steps += 1;
        self.window.time += time;
        let before = self.window.waited;
        self.window.waited = l.waited + engine::mutant!("waits-of-the-last-step", before, Duration::ZERO);
        self.window.flops += l.flops as f64;
        self.judge(Done { seconds: time.as_secs_f64(), waited: l.waited.as_secs_f64(), idle: idle.as_secs_f64(), first: l.first });
        Ok(())
    }

    fn judge(&mut self, done: Done) {
        self.steps += 1;
        self.recent.push_back(done.seconds);
        if self.recent.len() > RECENT {
            self.recent.pop_front();
        }
        self.unjudged.push(done);
        if self.recent.len() < ENOUGH {
            return;
        }
        let median = self.median();
        for d in std::mem::take(&mut self.unjudged) {
            if let Some(cause) = cause(d, median) {
                *self.slow.entry(cause).or_default() += 1;
            }
        }
    }

    /// Seconds of a step, of the last ones.
    pub fn median(&self) -> f64 {
        let mut sorted: Vec<f64> = self.recent.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
    }

    /// How many steps took far longer than the median.
    pub fn slow(&self) -> u64 {
        self.slow.values().sum()
    }

    /// The slow steps and why they were; None if there were none.
    pub fn slow_line(&self) -> Option<String> {
        let causes: Vec<String> = self.slow.iter().map(|(cause, n)| format!("{n} {}", cause.name())).collect();
        (!causes.is_empty()).then(|| {
            let ms = self.median() * 1e3;
            format!("{} of {} steps took more than twice the median of {ms:.3} ms: {}", self.slow(), self.steps, causes.join(", "))
        })
    }
}

/// What most of the time beyond the median went to, if the step is slow.
fn cause(d: Done, median: f64) -> Option<Cause> {
    let excess = d.seconds - median;
    if d.seconds <= SLOW * median {
        return None;
    }
    let most = |part: f64| part >= excess / 2.0;
    Some(match () {
        () if most(d.waited) => Cause::Data,
        () if d.first => Cause::First,
        () if most(d.idle) => Cause::Host,
        () => Cause::Work,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread::sleep;
    use std::time::Instant;

    fn cpu() -> Device {
        Device::cpu(engine::Cpu::new(1))
    }

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    /// Steps of these programs and milliseconds on the CPU, whose clock runs while it computes. How long it took to enter the first program, and
    /// all of it: a busy machine may take any time.
    fn step(clock: &mut Clock, timeline: &mut Timeline, at: u64, parts: &[(&str, u64)]) -> (Duration, Duration) {
        let (device, begun, mut entered) = (clock.device.clone(), Instant::now(), None);
        clock.begin(timeline).unwrap();
        for (program, time) in parts {
            timeline.enter(program, 1000, &device).unwrap();
            entered.get_or_insert(begun.elapsed());
            sleep(ms(*time));
        }
        clock.launched(at, timeline, Duration::ZERO).unwrap();
        (entered.unwrap(), begun.elapsed())
    }

    #[test]
    fn what_is_between_steps_is_not_timed() {
        let (mut clock, mut timeline) = (Clock::new(&cpu()), Timeline::default());
        let begun = Instant::now();
        step(&mut clock, &mut timeline, 1, &[("train", 10)]);
        clock.pause();
        timeline.enter("eval", 7, &cpu()).unwrap();
        let evaluation = Instant::now();
        sleep(ms(200));
        let evaluation = evaluation.elapsed();
        step(&mut clock, &mut timeline, 2, &[("train", 10)]);
        let w = clock.up_to(2).unwrap();
        assert_eq!((w.steps, w.flops), (2, 2000.0));
        assert!((ms(20)..=begun.elapsed() - evaluation).contains(&w.time) && w.phases.len() == 1, "{w:?}");
        assert_eq!(clock.up_to(2).unwrap().steps, 0);
    }

    #[test]
    fn a_gap_between_steps_is_timed_where_nothing_explains_it() {
        let (mut clock, mut timeline) = (Clock::new(&cpu()), Timeline::default());
        step(&mut clock, &mut timeline, 1, &[("train", 1)]);
        sleep(ms(50)); // the host was busy
        step(&mut clock, &mut timeline, 2, &[("train", 1)]);
        assert!(clock.up_to(2).unwrap().time >= ms(52));
    }

    #[test]
    fn parts_of_a_step_add_up() {
        let (mut clock, mut timeline) = (Clock::new(&cpu()), Timeline::default());
        let (before, all) = step(&mut clock, &mut timeline, 1, &[("free", 10), ("nudged", 30), ("nudged", 30), ("update", 5)]);
        let w = clock.up_to(1).unwrap();
        assert_eq!(w.phases.keys().map(String::as_str).collect::<Vec<_>>(), ["free", "nudged", "update"]);
        assert!(w.phases["nudged"] >= ms(60) && w.phases["free"] >= ms(10) && w.phases["free"] <= all - ms(65), "{w:?}");
        let sum: Duration = w.phases.values().sum();
        assert!(sum <= w.time && w.time <= sum + before, "{w:?} {before:?}");
    }

    #[test]
    fn waits_of_a_windows_steps_add_up() {
        let (mut clock, mut timeline) = (Clock::new(&cpu()), Timeline::default());
        for (at, waited) in [(1, 3), (2, 5), (3, 7)] {
            clock.begin(&mut timeline).unwrap();
            clock.launched(at, &mut timeline, ms(waited)).unwrap();
        }
        assert_eq!(clock.up_to(3).unwrap().waited, ms(15));
        assert_eq!(clock.up_to(3).unwrap().waited, ms(0));
    }

    #[test]
    fn a_windows_figures_are_those_of_its_steps() {
        let w = Window { steps: 4, time: ms(2000), flops: 3e12, ..Window::default() };
        assert_eq!((w.mfu(6e12), w.steps_per_second(), w.ms(ms(10))), (0.25, 2.0, 2.5));
    }

    #[test]
    fn slow_steps_are_counted_and_attributed() {
        let mut clock = Clock::new(&cpu());
        let usual = Done { seconds: 0.01, waited: 0.0, idle: 0.0, first: false };
        clock.judge(Done { seconds: 3.0, first: true, ..usual });
        (0..20).for_each(|i| clock.judge(Done { seconds: 0.01 + 1e-4 * f64::from(i % 3), ..usual }));
        clock.judge(Done { seconds: 0.5, waited: 0.45, idle: 0.45, ..usual });
        clock.judge(Done { seconds: 0.5, idle: 0.45, ..usual });
        clock.judge(Done { seconds: 0.019, ..usual }); // within twice the median
        clock.judge(Done { seconds: 0.05, waited: 0.001, ..usual });
        assert_eq!(clock.slow, [(Cause::Data, 1), (Cause::First, 1), (Cause::Host, 1), (Cause::Work, 1)].into());
        let line = clock.slow_line().unwrap();
        assert!(line.starts_with("4 of 25 steps took more than twice the median of 10.1"), "{line}");
        assert_eq!(Clock::new(&cpu()).slow_line(), None);
    }
}
