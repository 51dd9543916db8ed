//! Programs on a device, the state that they share, and what a step reports.

use super::TrainError;
use super::convert::{Converted, Pair};
use super::phase;
use crate::checkpoint::Loaded;
use crate::memory;
use crate::optim::ema;
use crate::report::human_bytes;
use crate::timing::Timeline;
use engine::cuda::nvtx;
use engine::ops::adamw8::{Map, absmax_of};
use engine::ops::nf4::PARTS;
use engine::profile::Profiler;
use engine::{Compiled, Data, Device, Graph, Program, Reading, Role, Store, Switches};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Programs and the state that they share.
pub struct Session {
    pub device: Device,
    pub store: Store,
    pub switches: Switches,
    pub programs: BTreeMap<String, Program>,
    /// Where there is one, runs are timed node by node into it.
    pub profile: Option<Vec<engine::cuda::Timed>>,
    /// Where there is one, runs are noted in it.
    pub profiler: Option<Profiler>,
    /// Where there is one, it notes when programs run.
    pub timeline: Option<Timeline>,
    /// Set when work is to end early.
    pub stop: Arc<AtomicBool>,
    /// Whether something fell back since the receipts were written down.
    pub fell_back: bool,
}

impl Session {
    pub fn new(device: &Device, switches: &Switches, seed: u64) -> Session {
        crate::recipes::register();
        Session {
            device: device.clone(),
            store: Store::new(seed),
            switches: switches.clone(),
            programs: BTreeMap::new(),
            profile: None,
            profiler: None,
            timeline: None,
            stop: Arc::default(),
            fell_back: false,
        }
    }

    /// For loops that are long and leave nothing half done.
    pub fn go_on(&self) -> Result<(), TrainError> {
        match self.stop.load(Ordering::Relaxed) {
            true => Err(TrainError::Stopped),
            false => Ok(()),
        }
    }

    /// The program of micro-batch `m` of a step: after the first, the one that a pass has made for weights that are the same as before (`Task::again`).
    pub fn micro(&self, step: u64, m: usize) -> &'static str {
        let _ = step; // which a planted error alone asks for
        // In the step in which a warm-up ends, all micro-batches are like the first.
        let later = engine::mutant!("fp8-weights-of-the-step-before", m > 0, m > 0 || step > 0);
        let again = later && self.programs.contains_key("again") && !self.programs["micro"].is_warming_up();
        if again { "again" } else { "micro" }
    }

    pub fn load(&mut self, name: &str, graph: Graph) -> Result<(), TrainError> {
        let compiled = Compiled::new(graph, &self.switches, self.device.target())?;
        // Later programs share state and arena with the first.
        if self.programs.is_empty() {
            self.has_room(&compiled)?;
        }
        self.load_compiled(name, compiled)
    }

    /// Loads the programs of a phase, the first of which is run first (see `phase`). Where the machine has no memory for what that could make once for all,
    /// nothing is.
    pub fn load_phase(&mut self, graphs: Vec<(&'static str, Graph)>) -> Result<(), TrainError> {
        let (switches, target) = (&self.switches, self.device.target());
        let mut compiled = phase::compile(graphs.clone(), switches, target)?;
        if compiled.iter().any(|(_, c)| phase::merged(c) > 0)
            && memory::available(&self.device).is_some_and(|free| self.takes(&compiled) > free)
        {
            let why = "a merged copy of the weights does not fit into the memory that is free";
            crate::warn!("note: adapters are applied to every token: {why}");
            compiled = phase::apart(graphs, switches, target, why)?;
        }
        if self.programs.is_empty() {
            self.has_room(&compiled[0].1)?;
        }
        compiled.into_iter().try_for_each(|(name, c)| self.load_compiled(name, c))
    }

    /// Bytes that programs need beyond what is there.
    fn takes(&self, programs: &phase::Programs) -> u64 {
        let states = programs.iter().flat_map(|(_, c)| c.graph.states()).map(|(s, meta)| (s.name.as_str(), meta.bytes()));
        let new: BTreeMap<&str, usize> = states.filter(|(name, _)| self.store.get(name).is_none()).collect();
        let arena = programs.iter().map(|(_, c)| c.memory()).map(|m| m.activations + m.workspace).max().unwrap_or(0);
        (new.values().sum::<usize>() + arena) as u64
    }

    /// Refuses what the machine has no memory for, before any is taken.
    fn has_room(&self, compiled: &Compiled) -> Result<(), TrainError> {
        let m = &compiled.plan.memory;
        let (state, arena) = (m.state as u64, (m.activations + m.workspace) as u64);
        match memory::available(&self.device) {
            Some(free) if state.saturating_add(arena) > free => Err(TrainError::Other(format!(
                "needs {} of memory (state {}, activations and workspace {}), and {} are free: it wants a machine or a GPU with more, or a smaller model",
                human_bytes(state.saturating_add(arena)),
                human_bytes(state),
                human_bytes(arena),
                human_bytes(free)
            ))),
            _ => Ok(()),
        }
    }

    pub fn load_compiled(&mut self, name: &str, compiled: Compiled) -> Result<(), TrainError> {
        self.programs.insert(name.into(), Program::from_compiled(compiled, &self.device, &mut self.store)?);
        self.say_fallbacks(name);
        Ok(())
    }

    /// Warns of what did not work on the device and was replaced.
    fn say_fallbacks(&mut self, name: &str) {
        for f in self.programs.get_mut(name).map(|p| p.fell_back()).unwrap_or_default() {
            crate::warn!(
                "warning: program '{name}', {} (in {}): {} (--pass {}=require makes it an error)",
                f.setting,
                f.site,
                f.reason,
                f.setting
            );
            self.fell_back = true;
        }
    }

    pub fn run(&mut self, name: &str, feeds: &[(&str, Data)]) -> Result<(), TrainError> {
        let program = self.programs.get_mut(name).ok_or_else(|| TrainError::Other(format!("program '{name}' is not loaded")))?;
        if let Some(profile) = &mut self.profile {
            profile.extend(program.profile(&mut self.store, feeds)?);
            return Ok(());
        }
        if let Some(timeline) = &mut self.timeline {
            let added: u64 = program.receipts.iter().map(|r| r.added_flops).sum();
            let twice = engine::mutant!("recomputation-counts-as-work", added, 0);
            timeline.enter(name, program.flops.saturating_sub(twice), &self.device)?;
        }
        let _range = nvtx::range(name);
        match &mut self.profiler {
            Some(profiler) => program.trace(name, &mut self.store, feeds, profiler)?,
            None => program.run(&mut self.store, feeds)?,
        }
        self.say_fallbacks(name);
        Ok(())
    }

    /// Does something on the host that profiles show by this name.
    pub fn span<R>(&mut self, name: &str, f: impl FnOnce(&mut Session) -> R) -> R {
        let (_range, start) = (nvtx::range(name), self.profiler.as_ref().map(Profiler::now));
        let result = f(self);
        if let (Some(profiler), Some(start)) = (&mut self.profiler, start) {
            profiler.host(name, start);
        }
        result
    }

    pub fn read(&self, program: &str, output: &str) -> Result<Vec<f32>, TrainError> {
        Ok(self.programs[program].read(output, &self.store)?)
    }

    pub fn scalar(&self, program: &str, output: &str) -> Result<f64, TrainError> {
        Ok(self.read(program, output)?[0] as f64)
    }

    /// Takes every parameter from a file; names and shapes must agree exactly.
    pub fn load_params(&mut self, file: &Loaded, what: &str) -> Result<(), TrainError> {
        let has = |name: &str| self.store.get(name).is_some_and(|t| t.role == Role::Param);
        if let Some(extra) = file.names().iter().find(|n| !has(n)) {
            return Err(TrainError::Other(format!(
                "{what} holds '{extra}', which this model does not have: it is of another model or config"
            )));
        }
        self.load_used_params(file, what)
    }

    /// Takes every parameter that the loaded programs read. Of a checkpoint whose own config they are recorded from: it may hold more, which
    /// training alone reads.
    pub fn load_used_params(&mut self, file: &Loaded, what: &str) -> Result<(), TrainError> {
        let params: Vec<(String, engine::Meta)> =
            self.store.iter().filter(|(_, t)| t.role == Role::Param).map(|(n, t)| (n.to_string(), t.whole())).collect();
        for (name, meta) in params {
            self.take(file, &name, &meta, what)?;
        }
        Ok(())
    }

    /// Takes every other state that outlives a run; averages of parameters are in a file of their own. `convert`: also states that the file keeps in
    /// another form than the passes of this run do.
    pub fn load_state(&mut self, file: &Loaded, averages: Option<&Loaded>, what: &str, convert: bool) -> Result<Converted, TrainError> {
        let mut done = Converted::default();
        let kept: Vec<(String, engine::Meta, bool)> = self
            .store
            .iter()
            .filter(|(n, t)| t.role == Role::Carried && is_kept(n) && !Map::is_absmax(n))
            .map(|(n, t)| (n.to_string(), t.whole(), !t.parts.is_empty()))
            .collect();
        for (name, meta, is_divided) in kept {
            match (name.strip_prefix(ema::PREFIX), averages) {
                (Some(param), Some(averages)) => self.take_as(averages, param, &name, &meta, what)?,
                // Nothing was averaged yet.
                (Some(_), None) => {}
                // What a pass keeps begins anew where the run was without that pass.
                (None, _) if engine::passes::keeps(&name) && file.get(&name).is_none() => {
                    let pass = name.split('.').next().unwrap_or(&name);
                    let had = file.names().iter().any(|n| engine::passes::keeps(n) && n.split('.').next() == Some(pass));
                    done.anew.extend(had.then(|| pass.to_string()));
                }
                (None, _)
                    if (Pair { file, what, name: &name, meta: &meta, is_divided }).convert(&mut self.store, convert, &mut done)? => {}
                (None, _) => {
                    self.take(file, &name, &meta, what)?;
                    if let Some((map, base)) = Map::of_bytes(&name) {
                        self.take(file, &map.names(base)[1], &absmax_of(&meta), what)?;
                    }
                }
            }
        }
        Ok(done)
    }

    /// Runs `f` with the averages of the parameters in their place, where a run has averaged any (train.ema).
    pub fn averaged<R>(&mut self, f: impl FnOnce(&mut Session) -> Result<R, TrainError>) -> Result<R, TrainError> {
        let mass = self.store.get(ema::MASS).map_or(Ok(vec![0.0]), |mass| mass.f32())?;
        if mass[0] == 0.0 {
            return f(self);
        }
        self.exchange_averages()?;
        let done = engine::mutant!("averages-stay-after-a-stop", f(self), Ok(f(self)?));
        self.exchange_averages()?;
        done
    }

    /// Exchanges the parameters and their averages: programs read them where they are.
    fn exchange_averages(&mut self) -> Result<(), TrainError> {
        let averages: Vec<String> = self.store.iter().filter(|(n, _)| n.starts_with(ema::PREFIX)).map(|(n, _)| n.into()).collect();
        for average in averages {
            let param = &average[ema::PREFIX.len()..];
            let held = |name: &str| {
                let t = self.store.get(name).ok_or_else(|| TrainError::Other(format!("there is no '{name}'")))?;
                Ok::<_, TrainError>((t.meta.clone(), t.bytes()?.into_owned()))
            };
            let ((meta, ours), (_, theirs)) = (held(param)?, held(&average)?);
            self.store.set(param, &meta, &theirs)?;
            self.store.set(&average, &meta, &ours)?;
        }
        Ok(())
    }

    fn take(&mut self, file: &Loaded, name: &str, meta: &engine::Meta, what: &str) -> Result<(), TrainError> {
        self.take_as(file, name, name, meta, what)
    }

    /// `name` of the file becomes the state `own`.
    fn take_as(&mut self, file: &Loaded, name: &str, own: &str, meta: &engine::Meta, what: &str) -> Result<(), TrainError> {
        let (dtype, shape, bytes) =
            file.get(name).ok_or_else(|| TrainError::Other(format!("{what} has no '{name}': it is of another model or config")))?;
        if dtype != meta.dtype.name() || shape != meta.shape {
            if let [Some(was), Some(is)] = [&shape, &meta.shape].map(|shape| engine::passes::setting_of(name, shape)) {
                return Err(TrainError::Other(format!(
                    "{what} was trained with {was}, and this run has {is}: resume with the same setting (or start a new run from its weights with --init-from)"
                )));
            }
            return Err(TrainError::Other(format!("{what}: '{name}' is {dtype} {shape:?}, but this model has {meta:?}: another config")));
        }
        Ok(self.store.set(own, meta, bytes)?)
    }

    /// Numbers that are trained, or that are loaded and stay as they are.
    pub fn parameters(&self, role: Role) -> usize {
        // A matrix in NF4 has two weights in a byte, and beside them what its blocks are scaled by.
        let is_nf4 = |matrix: &str| PARTS.iter().all(|part| self.store.get(&format!("{matrix}.{part}")).is_some());
        let numbers = |name: &str, elements: usize| match name.rsplit_once('.').filter(|(matrix, _)| is_nf4(matrix)) {
            Some((_, part)) => {
                if part == PARTS[0] {
                    2 * elements
                } else {
                    0
                }
            }
            None => elements,
        };
        self.store.iter().filter(|(_, t)| t.role == role).map(|(name, t)| numbers(name, t.whole().elements())).sum()
    }
}

/// Scratch states (caches, gradients between micro-batches) mean nothing after a step.
pub fn is_kept(name: &str) -> bool {
    !name.starts_with(engine::SCRATCH)
}

/// A step's report on its way.
pub struct Pending {
    names: Vec<String>,
    numbers: Reading,
    /// Of another program.
    beside: Option<(&'static [&'static str], Reading)>,
    is_late: bool,
}

impl Pending {
    /// `numbers` has a value for each name; the last is how many steps in a row were skipped.
    pub fn new(names: impl IntoIterator<Item = impl Into<String>>, numbers: Reading) -> Pending {
        Pending { names: names.into_iter().map(Into::into).collect(), numbers, beside: None, is_late: false }
    }

    /// And these numbers, which come from elsewhere.
    pub fn beside(self, names: &'static [&'static str], numbers: Reading) -> Pending {
        Pending { beside: Some((names, numbers)), ..self }
    }

    /// The same, said to be still on its way: as on a GPU that has not come so far.
    pub fn late(self) -> Pending {
        Pending { is_late: true, ..self }
    }

    /// Whether `finish` would not wait.
    pub fn is_there(&self) -> bool {
        !self.is_late && self.numbers.is_there() && self.beside.as_ref().is_none_or(|(_, numbers)| numbers.is_there())
    }

    pub fn finish(self) -> Result<Step, TrainError> {
        let numbers = self.numbers.finish()?;
        let skipped_in_row = numbers[self.names.len()] as u64;
        let mut values: Vec<_> = self.names.into_iter().zip(numbers.into_iter().map(f64::from)).collect();
        if let Some((names, numbers)) = self.beside {
            values.extend(names.iter().map(|n| n.to_string()).zip(numbers.finish()?.into_iter().map(f64::from)));
        }
        Ok(Step { values, skipped_in_row })
    }
}

/// What one step reports.
pub struct Step {
    /// The first is the loss, where there is one.
    pub values: Vec<(String, f64)>,
    pub skipped_in_row: u64,
}
