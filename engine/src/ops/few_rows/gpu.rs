//! Matmuls of few rows on a GPU: which kernel runs, and how its blocks share the weights.

use super::FewRows;
use crate::kernel::{At, Code, Io, Launch, Place};
use crate::meta::{DType, block_stride};
use crate::ops::reduce::packs::pack;

/// Elements of a row that a warp takes at once, and rows of a tile.
const LINE: usize = 64;
const TILE: usize = 8;
/// K is split over so many warps on every GPU, so that the order of additions is the same.
const WARPS: usize = 8;
/// Bytes of weights in flight to a multiprocessor: enough to saturate memory, and little enough that the next kernel's prefetch fits too.
const AHEAD: usize = 96 << 10;

pub fn code(op: &FewRows, io: &Io) -> Code {
    let (weights, k) = (op.weights(io.x.len()), io.x[0].dim(0));
    let row = block_stride(&io.x[0].shape, &io.strides[0], 1).expect("rows evenly apart");
    let norm = op.norm.map(|_| 1);
    let read = weights.clone().chain([0]).chain(norm).map(|i| io.offsets[i]);
    let lengths: Vec<usize> = [k, row].into_iter().chain(read).collect();
    let launch = match io.x[0].dtype {
        DType::BF16 | DType::F16 if pack(&[DType::BF16], &lengths) == 8 => whole(op, io).unwrap_or_else(|| tensor(op, io)),
        _ => plain(op, io),
    };
    let list = |count: usize, name: &str| (0..count).map(|i| format!("{name}{i}")).collect::<Vec<_>>().join(", ");
    let more = op.add.then(|| io.x.len() - 1);
    let own = |input: Option<usize>| At::X(input.unwrap_or(0)); // a missing input is not read
    let mut args: Vec<Place> = [At::X(0), own(norm), own(more)].map(Place::from).into();
    args.extend(weights.clone().map(|i| Place::from(At::X(i))));
    args.extend((0..io.y.len()).map(|i| Place::from(At::Y(i))));
    launch
        .define_type("T", io.x[0].dtype)
        .define_type("TN", norm.map_or(DType::F32, |i| io.x[i].dtype))
        .define_type("TR", more.map_or(DType::F32, |i| io.x[i].dtype))
        .define_type("OUT", io.y[0].dtype)
        .define("ROWS", io.x[0].dim(1))
        .define("K", k)
        .define("X_ROW", row)
        .define("NORM", op.norm.is_some() as u8)
        .define("PAIR", op.swiglu as u8)
        .define("ADD", op.add as u8)
        .define_f32("EPS", op.norm.unwrap_or(0.0))
        .define("WEIGHT_ARGS", list(weights.len(), "const T *w"))
        .define("WEIGHT_LIST", list(weights.len(), "w"))
        .define("OUT_ARGS", list(io.y.len(), "OUT *y"))
        .define("OUT_LIST", list(io.y.len(), "y"))
        .define("COLUMNS", numbers(io.y.iter().map(|y| y.dim(0))))
        .args(&args)
        .code()
}

fn numbers(all: impl Iterator<Item = usize>) -> String {
    all.map(|n| n.to_string()).collect::<Vec<_>>().join(", ")
}

/// Prefix sums: the offset of each part, and last the total.
fn starts(parts: impl Iterator<Item = usize>) -> (Vec<usize>, usize) {
    parts.fold((vec![], 0), |(mut before, all), n| {
        before.push(all);
        (before, all + n)
    })
}

/// Bytes of weights that a block loads at once; and that it has in flight and in shared memory, if they do not all fit.
const PIECE: usize = 8 << 10;
const RING: usize = 176 << 10;

/// The kernel for an x that fits into registers: a block's weights take half of the shared memory, all at once or in rounds.
fn whole(op: &FewRows, io: &Io) -> Option<Launch> {
    let (rows, k, weights) = (io.x[0].dim(1), io.x[0].dim(0), op.weights(io.x.len()));
    let (first, all) = starts(io.y.iter().map(|y| y.dim(0).div_ceil(TILE)));
    let (eights, sixteens, sides) = (rows.div_ceil(8), rows.div_ceil(16), if op.swiglu { 2 } else { 1 });
    let multiprocessors = io.arch.multiprocessors as usize;
    let share = all.div_ceil(multiprocessors);
    // With one tile per block, loading x dominates: use twice the warps, if the registers allow it.
    let long = share * sides == 1 && rows <= 16 && (3 * WARPS..=4 * WARPS).contains(&k.div_ceil(LINE));
    let warps = if long { 2 * WARPS } else { k.div_ceil(LINE).min(WARPS) };
    let lines = k.div_ceil(LINE).div_ceil(warps);
    // Pad rows of weights so that consecutive rows start half of the banks apart.
    let row = k + (96 - k % 64) % 64;
    let stride = |tiles: usize| tiles * TILE + if tiles.is_multiple_of(2) { 8 } else { 0 };
    let sums = |tiles: usize, rounds: usize| 4 * warps * 16 * sixteens * (rounds * stride(tiles) + 1);
    let half = io.arch.shared_limit() / 2;
    let at_once = (PIECE / (2 * k)).clamp(1, 32);
    let tiles = share * sides;
    let barriers = (2 * tiles * TILE * row).max(sums(tiles, 1));
    let (tiles, rounds, piece, flight, sums_at, barriers, slots) =
        if tiles * sixteens <= 6 && barriers + 8 * (tiles * TILE).div_ceil(at_once) <= half {
            let flight = ((tiles * TILE / 3).max(2 * PIECE / (2 * k)) / at_once).max(1);
            (tiles, 1, at_once, flight, 0, barriers, (tiles * TILE).div_ceil(at_once))
        } else {
            let fits = |&tiles: &usize| (RING.min(io.arch.shared_limit()) - sums(tiles, 2)) / (2 * tiles * TILE * row) >= 3;
            let tiles = [2 * sides, sides].into_iter().filter(|t| t * TILE <= 32).find(fits)?;
            let (rounds, ring) = (share.div_ceil(tiles / sides), RING.min(io.arch.shared_limit()) - sums(tiles, 2));
            let slots = (ring / (2 * tiles * TILE * row)).min(rounds);
            let sums_at = slots * 2 * tiles * TILE * row;
            (tiles, rounds, tiles * TILE, slots, sums_at, sums_at + sums(tiles, 2), slots)
        };
    // x times the norm's weight, before it is scaled by rstd, may overflow f16.
    let narrow = op.norm.is_some() && (io.x[0].dtype == DType::F16 || io.x[1].dtype == DType::F16);
    if io.arch.sm < 90 || !(1..weights.end).all(|i| io.settled[i]) || narrow || lines * eights > 12 {
        return None;
    }
    let source =
        [include_str!("../attention/mma.cuh"), include_str!("../attention/barriers.cuh"), PLACE, include_str!("whole.cu")].concat();
    let shared = barriers + 8 * slots;
    let launch = Launch::new(&source, "few_rows_whole")
        .define("WARPS", warps)
        .define("LINES", lines)
        .define("TILES", tiles)
        .define("ROUNDS", rounds)
        .define("W_ROW", row)
        .define("SUMS", sums_at)
        .define("BARRIERS", barriers)
        .define("CR", piece)
        .define("FLIGHT", flight)
        .define("FIRST", numbers(first.into_iter()))
        .define("ALL_TILES", all)
        .grid(multiprocessors, 1, 1)
        .block(32 * warps)
        .shared(if rounds == 1 { io.arch.alone(shared) } else { shared });
    Some(launch)
}

const PLACE: &str = include_str!("place.cuh");

fn tensor(op: &FewRows, io: &Io) -> Launch {
    let weights = op.weights(io.x.len());
    let (rows, k) = (io.x[0].dim(1), io.x[0].dim(0));
    let (first, all) = starts(io.y.iter().map(|y| y.dim(0).div_ceil(TILE)));
    let sides = if op.swiglu { 2 } else { 1 };
    let warps = k.div_ceil(LINE).min(WARPS);
    let lines = k.div_ceil(LINE).div_ceil(warps);
    // One block per multiprocessor, so that the next kernel's blocks fit too. It processes its tiles in rounds, with sums in registers.
    let limit = io.arch.shared_limit();
    let sixteens = rows.div_ceil(16);
    let most = if limit > 128 << 10 { 6 } else { 4 } / sixteens / sides;
    let share = all.div_ceil(io.arch.multiprocessors as usize);
    let rounds = share.div_ceil(most);
    let side = share.div_ceil(rounds);
    let tiles = side * sides;
    let stride = tiles * TILE + if tiles.is_multiple_of(2) { 8 } else { 0 };
    let sums = 4 * warps * 16 * sixteens * (stride + 1);
    let stage = warps * tiles * TILE * LINE * 2;
    let stages = (AHEAD.min(limit - sums) / stage).min(rounds * lines);
    let ahead = (8 / rows.div_ceil(8)).min(lines);
    Launch::new(&[include_str!("../attention/mma.cuh"), PLACE, include_str!("few_rows.cu")].concat(), "few_rows")
        .define("WARPS", warps)
        .define("LINES", lines)
        .define("TILES", tiles)
        .define("ROUNDS", rounds)
        .define("STAGES", stages)
        .define("AHEAD", ahead)
        .define("FIRST", numbers(first.into_iter()))
        .define("ALL_TILES", all)
        .define("EARLY", weights.clone().all(|i| io.settled[i]) as u8)
        .grid(all.div_ceil(rounds * side), 1, 1)
        .block(32 * warps)
        .shared(stages * stage + sums)
}

fn plain(op: &FewRows, io: &Io) -> Launch {
    let (first, all) = starts(io.y.iter().map(|y| y.dim(0)));
    Launch::new(include_str!("plain.cu"), "few_rows_plain")
        .define("PARTS", if op.swiglu { 1 } else { io.y.len() })
        .define("FIRST", numbers(first.into_iter()))
        .define("ALL_COLUMNS", all)
        .grid(all.div_ceil(8), 1, 1)
}
