//! A graph, rewritten, planned and loaded on a device.

use crate::cpu::{Buffer, Cpu, CpuProgram, Data};
use crate::error::Error;
use crate::graph::Graph;
use crate::passes::{self, Receipt, Switches, Target};
use crate::plan::{Memory, Plan};
use crate::store::Store;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Where programs run. Its programs run one at a time and share one arena, as large as the largest needs.
#[derive(Clone)]
pub struct Device {
    cpu: Cpu,
    arena: Arc<Mutex<Buffer>>,
}

impl Device {
    pub fn cpu(cpu: Cpu) -> Device {
        Device { cpu, arena: Arc::new(Mutex::new(Buffer::zeroed(0))) }
    }

    pub fn describe(&self) -> String {
        format!("cpu, {} threads", self.cpu.threads())
    }

    pub fn threads(&self) -> usize {
        self.cpu.threads()
    }
}

/// Rewritten and planned, but not loaded: what `kiln plan` looks at.
pub struct Compiled {
    pub graph: Graph,
    pub plan: Plan,
    pub receipts: Vec<Receipt>,
}

impl Compiled {
    pub fn new(mut graph: Graph, switches: &Switches) -> Result<Compiled, Error> {
        let receipts = passes::run(&mut graph, switches, Target::Cpu)?;
        let plan = Plan::new(&graph, &CpuProgram::workspace);
        Ok(Compiled { graph, plan, receipts })
    }

    /// See `Plan::by_part`.
    pub fn by_part(&self) -> BTreeMap<String, usize> {
        self.plan.by_part(&self.graph, &CpuProgram::workspace)
    }
}

/// A graph and its plan, loaded on a device.
pub struct Program {
    pub receipts: Vec<Receipt>,
    pub memory: Memory,
    pub flops: u64,
    pub bytes: u64,
    cpu: CpuProgram,
}

impl Program {
    /// Rewrites, plans and loads a graph, and creates the states that it names.
    pub fn load(graph: Graph, switches: &Switches, device: &Device, store: &mut Store) -> Result<Program, Error> {
        Program::from_compiled(Compiled::new(graph, switches)?, device, store)
    }

    pub fn from_compiled(c: Compiled, device: &Device, store: &mut Store) -> Result<Program, Error> {
        store.ensure(&c.graph)?;
        let (memory, cost) = (c.plan.memory, c.plan.cost);
        let cpu = CpuProgram::new(c.graph, c.plan, &device.cpu, &device.arena);
        Ok(Program { receipts: c.receipts, memory, flops: cost.flops, bytes: cost.bytes, cpu })
    }

    pub fn run(&mut self, store: &mut Store, feeds: &[(&str, Data)]) -> Result<(), Error> {
        self.cpu.run(store, feeds)
    }

    /// An output of the last run, in f32. Another program's run in between overwrites it.
    pub fn read(&self, name: &str, store: &Store) -> Result<Vec<f32>, Error> {
        self.cpu.read(name, store)
    }

    /// An output of one element.
    pub fn scalar(&self, name: &str, store: &Store) -> Result<f32, Error> {
        Ok(self.read(name, store)?[0])
    }
}
