//! Programs: a graph is rewritten by passes, planned in memory, loaded on a device, and run.

use crate::cpu::{Buffer, Cpu, CpuProgram, Data};
use crate::cuda::{self, Cuda, CudaProgram, Fallback};
use crate::error::Error;
use crate::executor::offloaded;
pub use crate::executor::{imagined, own_memory};
use crate::graph::Graph;
use crate::meta::DType;
use crate::passes::{self, Receipt, Switches, Target, WarmUp};
use crate::plan::{Memory, Plan, Spot};
use crate::store::Store;
use crate::warm_up::Before;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Where programs run. Its programs run one at a time and share one arena, as large as the largest of them needs.
#[derive(Clone)]
pub enum Device {
    /// The CPU and its arena.
    Cpu(Cpu, Arc<Mutex<Buffer>>),
    /// A GPU and its arena.
    Cuda(Cuda, Arc<Mutex<cuda::Memory>>),
}

impl Device {
    /// A CPU device with an empty arena.
    pub fn cpu(cpu: Cpu) -> Device {
        Device::Cpu(cpu, Arc::new(Mutex::new(Buffer::zeroed(0))))
    }

    /// A GPU device with an empty arena.
    pub fn cuda(cuda: Cuda) -> Result<Device, Error> {
        let arena = cuda.allocate(0)?;
        Ok(Device::Cuda(cuda, Arc::new(Mutex::new(arena))))
    }

    /// For logs: the GPU's name and compute capability, or the number of threads.
    pub fn describe(&self) -> String {
        match self {
            Device::Cpu(cpu, _) => format!("cpu, {} thread{}", cpu.threads(), if cpu.threads() == 1 { "" } else { "s" }),
            Device::Cuda(cuda, _) => format!("{}, compute capability {}.{}", cuda.name(), cuda.arch().sm / 10, cuda.arch().sm % 10),
        }
    }

    /// What programs for this device are compiled for.
    pub fn target(&self) -> Target {
        match self {
            Device::Cpu(..) => Target::Cpu,
            Device::Cuda(cuda, _) => Target::Cuda(cuda.arch()),
        }
    }

    /// Waits until everything that was started has finished.
    pub fn synchronize(&self) -> Result<(), Error> {
        match self {
            Device::Cpu(..) => Ok(()),
            Device::Cuda(cuda, _) => cuda.synchronize(),
        }
    }

    /// Bytes that the device uses besides programs and states.
    pub fn own_memory(&self) -> usize {
        own_memory(self.target())
    }

    /// What is in use of a GPU's memory, as it was measured.
    pub fn usage(&self) -> Option<cuda::Usage> {
        self.gpu().map(Cuda::usage)
    }

    /// The GPU, if it is one.
    pub fn gpu(&self) -> Option<&Cuda> {
        match self {
            Device::Cpu(..) => None,
            Device::Cuda(cuda, _) => Some(cuda),
        }
    }
}

/// A graph after all passes, with its memory plan, but not loaded on a device: what `kiln plan` shows.
pub struct Compiled {
    /// The graph after all passes.
    pub graph: Graph,
    /// Where its values lie.
    pub plan: Plan,
    /// One for each pass, then one for each executor setting.
    pub receipts: Vec<Receipt>,
    pub(crate) options: cuda::Options,
    pub(crate) target: Target,
    /// What runs first, if a pass asks for a warm-up.
    pub(crate) before: Option<Box<(WarmUp, Compiled)>>,
}

impl Compiled {
    /// Runs all passes on a graph and plans its memory.
    pub fn new(mut graph: Graph, switches: &Switches, machine: Target) -> Result<Compiled, Error> {
        let recorded = graph.clone();
        let mut receipts = passes::run(&mut graph, switches, machine)?;
        let (options, of_executor) = cuda::Options::new([&recorded, &graph], switches, machine)?;
        receipts.extend(of_executor);
        let target = match machine {
            Target::Cpu => Target::Cpu,
            Target::Cuda(gpu) => Target::Cuda(options.arch(gpu)),
        };
        let mut plan = Plan::new(&graph, &|g, spots| workspace(target, g, spots))?;
        if options.offload {
            plan.memory.host = offloaded(&graph).iter().map(|s| s.1).sum();
            plan.memory.state -= plan.memory.host;
        }
        let mut before = None;
        if let Some(warm_up) = receipts.iter().find_map(|r| r.warm_up.clone()) {
            let first = Compiled::new(recorded, &switches.clone().with(warm_up.pass, &warm_up.value)?, machine)?;
            if first.plan.arena() > plan.arena() {
                (plan.memory.activations, plan.memory.workspace) = (first.plan.memory.activations, first.plan.memory.workspace);
            }
            before = Some(Box::new((warm_up, first)));
        }
        Ok(Compiled { graph, plan, receipts, options, target, before })
    }

    /// Bytes that it needs once it is loaded, by purpose.
    pub fn memory(&self) -> Memory {
        let sets = match self.target {
            Target::Cpu => 1,
            Target::Cuda(_) => 3, // two more sets of buffers, so that copies overlap with runs
        };
        Memory { feeds: sets * self.plan.memory.feeds, ..self.plan.memory }
    }

    /// Peak memory of each part of the model (see [`Plan::by_part`]).
    pub fn by_part(&self) -> BTreeMap<String, usize> {
        self.plan.by_part(&self.graph, &|g, spots| workspace(self.target, g, spots))
    }
}

/// f32 elements of scratch memory that each node needs.
fn workspace(target: Target, g: &Graph, spots: &[Vec<Spot>]) -> Vec<usize> {
    match target {
        Target::Cpu => (0..g.nodes.len()).map(|i| CpuProgram::workspace(g, spots, i)).collect(),
        Target::Cuda(arch) => cuda::codes(g, spots, arch).map(|c| c.workspace.div_ceil(4)).collect(),
    }
}

/// A compiled graph, loaded on a device and ready to run.
pub struct Program {
    /// One for each pass, then one for each executor setting.
    pub receipts: Vec<Receipt>,
    /// Bytes that it needs, by purpose.
    pub memory: Memory,
    /// Floating-point operations of one run.
    pub flops: u64,
    /// Bytes that the ops of one run read and write at least.
    pub bytes: u64,
    /// Its feeds by name, and which part of each this rank has; of a whole one, none.
    pub feeds: BTreeMap<String, Vec<crate::ranks::Part>>,
    loaded: Loaded,
    before: Option<Before<Loaded>>,
    /// What did not work, and that the caller has not been told of.
    fell_back: Vec<Fallback>,
}

pub(crate) enum Loaded {
    Cpu(Box<CpuProgram>),
    Cuda(Box<CudaProgram>),
}

impl Loaded {
    fn new(graph: Graph, plan: Plan, options: cuda::Options, device: &Device) -> Result<Loaded, Error> {
        Ok(match device {
            Device::Cpu(cpu, arena) => Loaded::Cpu(Box::new(CpuProgram::new(graph, plan, cpu, arena)?)),
            Device::Cuda(cuda, arena) => Loaded::Cuda(Box::new(CudaProgram::new(graph, plan, cuda, arena, options)?)),
        })
    }
}

impl Loaded {
    fn cuda(&self) -> Option<&CudaProgram> {
        match self {
            Loaded::Cpu(_) => None,
            Loaded::Cuda(p) => Some(p),
        }
    }

    fn fell_back(&mut self) -> Vec<Fallback> {
        match self {
            Loaded::Cpu(_) => vec![],
            Loaded::Cuda(p) => p.fell_back(),
        }
    }
}

impl Program {
    /// Compiles a graph and loads it, and creates those of its states that the store does not have yet.
    pub fn load(graph: Graph, switches: &Switches, device: &Device, store: &mut Store) -> Result<Program, Error> {
        Program::from_compiled(Compiled::new(graph, switches, device.target())?, device, store)
    }

    /// Loads a compiled graph, and creates those of its states that the store does not have yet.
    pub fn from_compiled(c: Compiled, device: &Device, store: &mut Store) -> Result<Program, Error> {
        let offloaded: Vec<&str> = if c.options.offload { offloaded(&c.graph).into_iter().map(|s| s.0).collect() } else { vec![] };
        store.ensure(&c.graph, device.gpu(), &offloaded)?;
        let (mut memory, cost, feeds) = (c.memory(), c.plan.cost, c.graph.parts.of_feeds(&c.graph));
        let before = match c.before {
            Some(first) => {
                let (warm_up, first) = *first;
                Some(Before::new(Loaded::new(first.graph, first.plan, first.options, device)?, warm_up))
            }
            None => None,
        };
        let loaded = Loaded::new(c.graph, c.plan, c.options, device)?;
        for cuda in before.iter().map(|b| &b.loaded).chain([&loaded]).filter_map(|l| l.cuda()) {
            let own = cuda.memory();
            if own.activations + own.workspace > memory.activations + memory.workspace {
                (memory.activations, memory.workspace) = (own.activations, own.workspace); // kernels that fell back need more
            }
        }
        let (flops, bytes, fell_back) = (cost.flops, cost.bytes, vec![]);
        let mut program = Program { receipts: c.receipts, memory, flops, bytes, feeds, loaded, before, fell_back };
        program.note();
        device.usage(); // a peak may be here
        Ok(program)
    }

    /// Takes down in the receipts what did not work.
    pub(crate) fn note(&mut self) {
        let loaded = self.before.iter_mut().map(|b| &mut b.loaded).chain([&mut self.loaded]);
        let new: Vec<Fallback> = loaded.flat_map(Loaded::fell_back).collect();
        note(&mut self.receipts, &new);
        self.fell_back.extend(new);
    }

    /// What did not work since the last call and was replaced, for a warning. The receipts have it too.
    pub fn fell_back(&mut self) -> Vec<Fallback> {
        std::mem::take(&mut self.fell_back)
    }

    /// Runs once with these inputs, and updates the states. On a GPU it returns before the run has ended.
    pub fn run(&mut self, store: &mut Store, feeds: &[(&str, Data)]) -> Result<(), Error> {
        self.go_on(store)?;
        match self.now_mut() {
            Loaded::Cpu(p) => p.run(store, feeds)?,
            Loaded::Cuda(p) => {
                p.run(store, feeds)?;
                self.note();
            }
        }
        Ok(())
    }

    /// An output of the last run, in f32. Read it before another program runs, which may overwrite it.
    pub fn read(&self, name: &str, store: &Store) -> Result<Vec<f32>, Error> {
        match self.now() {
            Loaded::Cpu(p) => p.read(name, store),
            Loaded::Cuda(p) => p.read(name, store),
        }
    }

    /// Starts to copy an output to the host; [`Reading::finish`] waits for it. On a GPU the next run may start in between.
    pub fn start_read(&self, name: &str, store: &Store) -> Result<Reading, Error> {
        match self.now() {
            Loaded::Cpu(p) => Ok(Reading::There(p.read(name, store)?)),
            Loaded::Cuda(p) => Ok(Reading::Coming(p.start_read(name)?)),
        }
    }

    /// Counts a run, where a pass asks for a warm-up.
    pub(crate) fn go_on(&mut self, store: &Store) -> Result<(), Error> {
        self.before.as_mut().map_or(Ok(()), |before| before.go_on(store))
    }

    /// Runs that a pass asks for before it applies, which may all be over.
    pub fn warm_up(&self) -> u64 {
        self.before.as_ref().map_or(0, |b| b.warm_up.runs)
    }

    /// The warm-up that ended before the last run; once.
    pub fn warmed_up(&mut self) -> Option<WarmUp> {
        self.before.as_mut()?.ended()
    }

    fn now(&self) -> &Loaded {
        self.before.as_ref().filter(|b| b.is_running()).map_or(&self.loaded, |b| &b.loaded)
    }

    /// Whether the last run was a part of a warm-up.
    pub fn is_warming_up(&self) -> bool {
        self.before.as_ref().is_some_and(Before::is_running)
    }

    pub(crate) fn now_mut(&mut self) -> &mut Loaded {
        match &mut self.before {
            Some(before) if before.is_running() => &mut before.loaded,
            _ => &mut self.loaded,
        }
    }

    /// An output of one element.
    pub fn scalar(&self, name: &str, store: &Store) -> Result<f32, Error> {
        Ok(self.read(name, store)?[0])
    }
}

/// Places that an executor setting applied to, and that did not work, are declined ones.
fn note(receipts: &mut [Receipt], fell_back: &[Fallback]) {
    for f in fell_back {
        for receipt in receipts.iter_mut().filter(|r| r.pass == f.setting) {
            receipt.applied = receipt.applied.saturating_sub(1);
            receipt.decline(f.reason.clone(), &f.site);
        }
    }
}

/// An output on its way to the host (see [`Program::start_read`]).
pub enum Reading {
    /// Copied already.
    There(Vec<f32>),
    /// A copy from the GPU that may still be under way.
    Coming(cuda::Incoming),
}

impl Reading {
    /// Whether `finish` would return at once.
    pub fn is_there(&self) -> bool {
        match self {
            Reading::There(_) => true,
            Reading::Coming(bytes) => bytes.is_there(),
        }
    }

    /// Waits for the copy and returns the numbers.
    pub fn finish(self) -> Result<Vec<f32>, Error> {
        match self {
            Reading::There(numbers) => Ok(numbers),
            Reading::Coming(bytes) => Ok(crate::cpu::widened(&bytes.finish()?, DType::F32)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::fallback;
    use crate::passes::Mode;

    #[test]
    fn what_fell_back_is_a_declined_site_of_its_setting() {
        let receipt =
            |pass, applied| Receipt { pass, mode: Mode::Auto, applied, declined: vec![], notes: vec![], warm_up: None, added_flops: 0 };
        let mut receipts = vec![receipt("autotune", 5), receipt(fallback::CAPTURE, 1), receipt(fallback::NATIVE, 7)];
        let lost = fallback::uncaptured(Mode::Auto, Error::Cuda("capturing: not permitted".into())).unwrap();
        note(&mut receipts, &[lost]);
        let counts: Vec<(usize, usize)> = receipts.iter().map(|r| (r.applied, r.declined.len())).collect();
        assert_eq!(counts, [(5, 0), (0, 1), (7, 0)]);
        let said = receipts[1].summary();
        assert!(said.contains("capturing: not permitted") && said.contains("launched one by one"), "{said}");
    }
}
