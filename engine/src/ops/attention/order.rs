//! The order in which the persistent blocks of Hopper's attention kernels take their work items.

/// The orders, as CUDA source.
pub(super) const TEXT: &str = include_str!("order.cuh");

/// So many bytes are still in L2 when they are wanted again; H100 and H200 have 50 and 60 MB of it.
const L2: usize = 48 << 20;

/// Work items (pieces) of a kernel, by stream: those of a stream read the same bytes again and again.
pub(super) struct Work {
    pub causal: bool,
    /// Streams that read different bytes, and the bytes of all of them.
    pub streams: usize,
    pub bytes: usize,
    /// Pieces of the same length that read the same bytes and follow each other where the longest are first.
    pub neighbours: usize,
    /// Blocks that run at once.
    pub blocks: usize,
}

impl Work {
    /// Whether a block's bytes come from DRAM where the longest pieces of all streams are first: unless another block that runs at the same time wants them,
    /// too, or L2 holds those of all streams. Then one stream after another reads them once.
    ///
    /// Forward, 16,384 tokens in rows of 1k with 16 heads of 128: 738 MB instead of 268, at 3.8 TB/s. TFLOP/s on an H200 with the longest first and in pairs, by
    /// length of the rows: 353, 423 (1k); 428, 502 (2k); 532, 549 (4k); 570 to 596, 589 (8k); 616, 603 (16k). From 8k on four blocks or more have their keys in
    /// common. Heads of 64, with 192 queries a block instead of 128, ask for 3.0 TB/s and gain nothing: 309, 283 (1k); 383, 385 (2k).
    pub fn is_from_dram(&self) -> bool {
        let sharing = (self.blocks / self.streams).max(self.neighbours);
        self.causal && self.bytes > L2 && sharing < 3
    }
}

#[cfg(test)]
mod tests {
    use super::super::kernels;
    use super::*;
    use crate::kernel::{Arch, Io};
    use crate::meta::{DType, Meta};
    use std::process::Command;

    /// Forward: 16,384 tokens in rows of some length, `heads` heads of `d`, `group` of which have the same keys.
    fn work(length: usize, d: usize, heads: usize, group: usize) -> Work {
        let streams = 16384 / length * heads / group;
        let neighbours = if group.is_multiple_of(2) { group / 2 } else { group };
        Work { causal: true, streams, bytes: streams * length * 4 * d, neighbours, blocks: 132 }
    }

    #[test]
    fn rows_up_to_4k_read_their_keys_from_dram() {
        let found = [1024, 2048, 4096, 8192, 16384].map(|length| work(length, 128, 16, 1).is_from_dram());
        assert_eq!(found, [true, true, true, false, false]);
        // Qwen3-0.6B: 16 heads, 8 of keys. Qwen2.5-1.5B: 12 and 2, which L2 holds. 24 and 8: three blocks read the same keys anyway.
        assert!(work(1024, 128, 16, 2).is_from_dram());
        assert!(!work(1024, 128, 12, 6).is_from_dram());
        assert!(!work(1024, 128, 24, 3).is_from_dram());
        assert!(!Work { causal: false, ..work(1024, 128, 16, 1) }.is_from_dram());
    }

    /// The kernels count with as many blocks as are launched, else pieces would be left.
    #[test]
    fn blocks_in_pairs_are_those_that_are_launched() {
        let launch = |time: usize, kv: usize, multiprocessors: u32, dtype| {
            let meta = |heads: usize| Meta::new(&[16384 / time, time, heads, 128], dtype);
            let x = [meta(16), meta(kv), meta(kv)];
            let y = [meta(16), Meta::f32(&[16384 / time, 16, time])];
            let code = kernels::forward(&Io::plain(&x, &y, Arch { sm: 90, multiprocessors }), true, 0.1);
            let launch = code.steps[0].kernel().unwrap();
            let define = |name: &str| launch.defines.iter().find(|d| d.0 == name).map(|d| d.1.clone());
            (define("ORDER"), define("BLOCKS"), launch.grid[0])
        };
        for (kv, multiprocessors) in [(16, 132), (8, 132), (8, 78)] {
            let pairs = (Some("in_pairs".into()), Some(multiprocessors.to_string()), multiprocessors);
            assert_eq!(launch(1024, kv, multiprocessors, DType::BF16), pairs);
            assert_eq!(launch(1024, kv, multiprocessors, DType::F16), pairs);
        }
        assert_eq!(launch(8192, 16, 132, DType::BF16), (None, None, 132));

        let gradient = |examples: usize, time: usize, heads: usize, d: usize| {
            let meta = Meta::new(&[examples, time, heads, d], DType::BF16);
            let x = [0, 1, 2, 3, 4, 5].map(|i| if i == 4 { Meta::f32(&[examples, heads, time]) } else { meta.clone() });
            let code = kernels::backward(&Io::plain(&x, &x[..3], Arch { sm: 90, multiprocessors: 132 }), true, 0.1);
            let of = |name: &str, define: &str| {
                let launch = code.steps.iter().filter_map(|s| s.kernel()).find(|l| l.entry == name).unwrap();
                (launch.defines.iter().find(|d| d.0 == define).map(|d| d.1.clone()), launch.grid[0])
            };
            (of("attention_dkdv", "KEY_BLOCKS"), of("attention_dq", "BLOCKS"))
        };
        let all = (Some("132".into()), 132);
        assert_eq!(gradient(64, 1024, 12, 64), (all.clone(), all.clone()));
        assert_eq!(gradient(16, 1024, 16, 128), (all.clone(), all));
        assert_eq!(gradient(1, 16384, 16, 128), ((None, 132), (None, 132)));
    }

    /// The kernels' own text, compiled as C++: every piece of every stream is taken once, by live turns that come before all others of a block; and no block
    /// has much more work than another.
    const MAIN: &str = r#"
        #include <cstdio>
        #include <vector>
        typedef unsigned u32;
        #define __device__
        #define __forceinline__ inline
        ORDERS
        typedef Turn Order(u32, u32, u32, u32, u32);
        static u32 sizes = 0;
        // The work of the busiest block over the mean: a piece is as long as its number, and takes a little more.
        static double check(Order order, const char *name, u32 streams, u32 pieces, u32 blocks) {
            std::vector<u32> taken(streams * pieces);
            u32 most = 0, all = 0;
            for (u32 block = 0; block < blocks; block++) {
                u32 work = 0, rounds = 0;
                for (;; rounds++) {
                    Turn t = order(streams, pieces, blocks, block, rounds);
                    if (!t.live) break;
                    if (t.hole && rounds < 2 * streams * pieces) continue;
                    if (t.stream >= streams || t.piece >= pieces || taken[t.stream * pieces + t.piece]++) {
                        printf("%s: %u streams, %u pieces, %u blocks: block %u, round %u takes %u of %u\n", name, streams, pieces, blocks, block, rounds, t.piece, t.stream);
                        return 0;
                    }
                    work += t.piece + 2;
                }
                for (u32 later = rounds; later < rounds + 3; later++)
                    if (order(streams, pieces, blocks, block, later).live) printf("%s: %u, %u, %u: live after the end\n", name, streams, pieces, blocks);
                most = work > most ? work : most, all += work;
            }
            for (u32 n : taken)
                if (n != 1) { printf("%s: %u streams, %u pieces, %u blocks: a piece is left\n", name, streams, pieces, blocks); break; }
            sizes++;
            return (double)most * blocks / all;
        }
        int main() {
            struct { Order *order; const char *name; } orders[] = {{longest_first, "longest first"}, {in_pairs, "in pairs"}};
            for (auto o : orders) {
                for (u32 streams = 1; streams <= 24; streams++)
                    for (u32 pieces = 1; pieces <= 14; pieces++)
                        for (u32 blocks = 1; blocks <= streams * pieces && blocks <= 40; blocks++) check(o.order, o.name, streams, pieces, blocks);
                for (u32 streams = 1; streams <= 800; streams += 1 + streams / 16)
                    for (u32 pieces = 1; pieces <= 40; pieces += 1 + pieces / 4)
                        for (u32 most : {78u, 114u, 132u}) check(o.order, o.name, streams, pieces, streams * pieces < most ? streams * pieces : most);
                for (u32 length : {1024, 2048, 4096, 8192, 16384}) {
                    double busiest = check(o.order, o.name, 16384 / length * 16, length / 128, 132);
                    if (!(busiest < 1.04)) printf("%s: rows of %u: the busiest block has %.3f of the mean\n", o.name, length, busiest);
                }
            }
            printf("%u sizes\n", sizes);
        }
    "#;

    #[test]
    fn every_piece_is_taken_once() {
        if !crate::cuda::emulator::tests::can_emulate() {
            return;
        }
        let folder = std::env::temp_dir().join(format!("kiln-order-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (source, program) = (folder.join("order.cpp"), folder.join("order"));
        std::fs::write(&source, MAIN.replace("ORDERS", TEXT)).unwrap();
        let made = Command::new("g++").args(["-std=c++17", "-O1", "-o"]).arg(&program).arg(&source).output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let said = Command::new(&program).output().unwrap().stdout;
        std::fs::remove_dir_all(&folder).unwrap();
        let said = String::from_utf8_lossy(&said);
        let sizes = said.lines().last().and_then(|l| l.strip_suffix(" sizes")?.parse::<usize>().ok());
        assert!(said.lines().count() == 1 && sizes.is_some_and(|n| n > 10_000), "{said}");
    }
}
