// Runs a kernel's blocks one after another, and the threads of a block as fibers, which switch only where they wait for each other.
// A warp runs until all its lanes wait for other warps or are done. In the other order everything runs backwards: blocks, warps, lanes.
// So a read that lacks a barrier after the write happens too early in one of the two orders.
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

typedef void Entry(void **args);
struct Module { emu_thread **now; char *shared, *shared_end; };

namespace {

constexpr size_t STACK = 256 << 10, GUARD = 4096, MOST = 1024, BEHIND = 4096;
constexpr unsigned DYNAMIC = 1u << 24; // where dynamic shared memory begins, counted as PTX does; static shared memory begins at 0

struct Copy { void *to; const void *from; unsigned bytes, live; };

struct Fiber {
    emu_thread seen;
    ucontext_t context;
    void *here[5];
    bool made, started, done;
    const uint64_t *waits_for; // until this is no longer...
    uint64_t than;             // ...this
    Copy *copies; // under way, oldest first
    unsigned copy_count, copy_room;
    unsigned groups[64], group_count; // how many copies belong to each group that was committed
};

struct Warp {
    emu_slot slots[2][32];
    uint64_t meetings;
    unsigned all, lanes, arrived; // those that there are, that are not done, that wait
    int what;
};

struct Machine {
    Fiber fibers[MOST];
    Warp warps[MOST / 32];
    char *stacks, *dynamic;
    size_t dynamic_room, shared_bytes;
    unsigned threads, live, at_barrier;
    uint64_t barriers;
    int yes[2];
    Fiber *running;
    Module module;
    Entry *entry;
    void **args;
    bool backwards;
    void *scheduler[5];
    sigjmp_buf out;
    char why[512];
    char signal_stack[64 << 10];
};

thread_local Machine *machine = nullptr;
thread_local volatile bool launched = false;

[[noreturn]] void fail(Machine *m, const char *why) {
    Fiber *f = m->running;
    if (f)
        snprintf(m->why, sizeof m->why, "%s (block %u %u %u, thread %u)", why, f->seen.block.x, f->seen.block.y, f->seen.block.z, f->seen.index.x);
    else
        snprintf(m->why, sizeof m->why, "%s", why);
    siglongjmp(m->out, 1);
}

constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
struct sigaction before[4];

void on_signal(int number) {
    if (!launched) { // not ours: happens again, to whom it concerns
        for (int i = 0; i < 4; i++)
            if (SIGNALS[i] == number) sigaction(number, &before[i], nullptr);
        return;
    }
    fail(machine, number == SIGFPE ? "a division by zero" : number == SIGILL ? "an instruction that cannot be" :
         "an address that is not there, or 8 or 16 bytes at one that is no multiple of that");
}

// While one of these is called other fibers run: the compiler must not think that it knows which registers it leaves alone.
#define APART __attribute__((noinline, noipa))

// Switches to the scheduler, until this fiber runs again. The compiler's own jumps take a few instructions; the library's a hundred.
APART void back(Machine *m) { __builtin_longjmp(m->scheduler, 1); }
APART void leave(Machine *m) {
    if (!__builtin_setjmp(m->running->here)) back(m);
}

void body() {
    Machine *m = machine;
    for (;;) {
        m->entry(m->args);
        m->running->done = true;
        leave(m);
    }
}

APART void enter(Fiber *f) {
    if (f->started) __builtin_longjmp(f->here, 1);
    f->started = true;
    setcontext(&f->context);
}
APART void resume(Machine *m, Fiber *f) {
    m->running = f;
    *m->module.now = &f->seen;
    if (!__builtin_setjmp(m->scheduler)) enter(f);
    machine->running = nullptr;
}

void wait(Machine *m, const uint64_t *counter, uint64_t than) {
    Fiber *f = m->running;
    f->waits_for = counter, f->than = than;
    while (*counter == than) leave(m);
    f->waits_for = nullptr;
}

void barrier_passed(Machine *m) {
    m->at_barrier = 0;
    m->barriers++;
    m->yes[m->barriers & 1] = 0; // the next one's; all have read what the last but one said
}

bool ready(const Fiber &f) { return !f.done && (!f.waits_for || *f.waits_for != f.than); }

// Runs a warp's lanes until all wait for other warps or are done. Whether anything happened.
bool run_warp(Machine *m, unsigned warp) {
    Warp &w = m->warps[warp];
    bool any = false;
    for (bool moved = true; moved;) {
        moved = false;
        for (unsigned k = 0; k < 32; k++) {
            unsigned lane = m->backwards ? 31 - k : k;
            if (!(w.lanes >> lane & 1)) continue;
            Fiber &f = m->fibers[32 * warp + lane];
            if (!ready(f)) continue;
            resume(m, &f);
            if (f.done) m->live--, w.lanes &= ~(1u << lane);
            // A barrier does not wait for threads that have returned.
            if (f.done && m->live && m->at_barrier == m->live) barrier_passed(m);
            moved |= f.done || f.waits_for; // and has not only looked whether another one is so far
        }
        any |= moved;
    }
    return any;
}

void stuck(Machine *m) {
    unsigned at_meeting = 0, done = 0;
    for (unsigned t = 0; t < m->threads; t++) done += m->fibers[t].done, at_meeting += !m->fibers[t].done && m->fibers[t].waits_for && m->fibers[t].waits_for != &m->barriers;
    char text[256];
    snprintf(text, sizeof text, "stuck: of %u threads %u are done, %u wait at __syncthreads and %u for the rest of their warp", m->threads, done, m->at_barrier, at_meeting);
    fail(m, text);
}

void run_block(Machine *m, emu_dim block, unsigned char poison) {
    memset(m->module.shared, poison, m->module.shared_end - m->module.shared);
    memset(m->dynamic, poison, m->shared_bytes + BEHIND);
    m->live = m->threads, m->at_barrier = 0, m->barriers = 0, m->yes[0] = m->yes[1] = 0;
    unsigned warps = (m->threads + 31) / 32;
    for (unsigned w = 0; w < warps; w++) {
        unsigned lanes = m->threads - 32 * w;
        m->warps[w].all = m->warps[w].lanes = lanes < 32 ? (1u << lanes) - 1 : 0xffffffffu;
        m->warps[w].arrived = 0, m->warps[w].meetings = 0;
    }
    for (unsigned t = 0; t < m->threads; t++) {
        Fiber &f = m->fibers[t];
        f.seen.block = block;
        f.done = false, f.waits_for = nullptr, f.copy_count = f.group_count = 0;
    }
    for (unsigned idle = 0; m->live;) {
        bool any = false;
        for (unsigned k = 0; k < warps; k++) any |= run_warp(m, m->backwards ? warps - 1 - k : k);
        idle = any ? 0 : idle + 1;
        if (idle > 1000) stuck(m);
    }
    for (size_t i = 0; i < BEHIND; i++)
        if ((unsigned char)m->dynamic[m->shared_bytes + i] != poison) fail(m, "something was written behind the end of dynamic shared memory");
}

bool catch_signals() {
    struct sigaction ours = {};
    ours.sa_handler = on_signal;
    ours.sa_flags = SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 4; i++) sigaction(SIGNALS[i], &ours, &before[i]);
    return true;
}

Machine *prepare() {
    if (machine) return machine;
    Machine *m = (Machine *)calloc(1, sizeof(Machine));
    m->stacks = (char *)mmap(nullptr, MOST * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (m->stacks == MAP_FAILED) abort();
    for (size_t t = 0; t < MOST; t++) mprotect(m->stacks + t * STACK, GUARD, PROT_NONE);
    return machine = m;
}

Machine *current() { return machine; }

float wide(unsigned short v, int half) {
    if (half) {
        _Float16 h;
        memcpy(&h, &v, 2);
        return (float)h;
    }
    uint32_t bits = (uint32_t)v << 16;
    float r;
    memcpy(&r, &bits, 4);
    return r;
}

} // namespace

extern "C" {

// 0 where the kernel ran to its end; otherwise `why` says what was wrong.
int emu_launch(Entry *entry, void **args, const Module *module, const unsigned *grid, unsigned threads, unsigned shared, int backwards,
               unsigned char poison, char *why, unsigned why_bytes) {
    Machine *m = prepare();
    if (threads == 0 || threads > MOST) return snprintf(why, why_bytes, "a block of %u threads", threads), 1;
    m->module = *module, m->entry = entry, m->args = args, m->threads = threads, m->backwards = backwards, m->running = nullptr;
    m->shared_bytes = shared;
    if (m->dynamic_room < shared + BEHIND) {
        free(m->dynamic);
        m->dynamic_room = (shared + BEHIND + 1023) / 1024 * 1024;
        m->dynamic = (char *)aligned_alloc(1024, m->dynamic_room);
    }
    for (unsigned t = 0; t < threads; t++) {
        Fiber &f = m->fibers[t];
        f.seen = {{t, 0, 0}, {0, 0, 0}, {threads, 1, 1}, {grid[0], grid[1], grid[2]}, m->dynamic};
        if (!f.made) {
            getcontext(&f.context);
            f.context.uc_stack.ss_sp = m->stacks + t * STACK + GUARD;
            // Not all at the same place of a page, or they would drive each other out of the cache.
            f.context.uc_stack.ss_size = STACK - GUARD - t * 13 % 64 * 64;
            f.context.uc_link = nullptr;
            makecontext(&f.context, body, 0);
            f.made = true, f.started = false;
        }
    }
    static bool caught = catch_signals(); // once: launches of several threads overlap
    (void)caught;
    stack_t own = {}, old = {};
    own.ss_sp = m->signal_stack, own.ss_size = sizeof m->signal_stack;
    sigaltstack(&own, &old);
    int failed = sigsetjmp(m->out, 1);
    if (!failed) {
        launched = true;
        uint64_t blocks = (uint64_t)grid[0] * grid[1] * grid[2];
        for (uint64_t i = 0; i < blocks; i++) {
            uint64_t b = backwards ? blocks - 1 - i : i;
            run_block(m, {(unsigned)(b % grid[0]), (unsigned)(b / grid[0] % grid[1]), (unsigned)(b / grid[0] / grid[1])}, poison);
        }
    }
    launched = false;
    sigaltstack(&old, nullptr);
    if (failed) {
        // Fibers stopped in the middle begin anew.
        for (Fiber &f : m->fibers) f.made = f.started = false;
        snprintf(why, why_bytes, "%s", m->why);
    }
    return failed;
}

const emu_slot *emu_meet(int what, const void *brought, unsigned bytes) {
    Machine *m = current();
    unsigned t = m->running->seen.index.x, lane = t & 31;
    Warp &w = m->warps[t / 32];
    uint64_t now = w.meetings;
    if (w.arrived && w.what != what) fail(m, "lanes of a warp meet at different instructions");
    w.what = what;
    emu_slot *slots = w.slots[now & 1];
    memcpy(&slots[lane], brought, bytes);
    w.arrived |= 1u << lane;
    if (w.arrived == w.all) {
        w.arrived = 0;
        w.meetings++;
    } else {
        wait(m, &w.meetings, now);
    }
    return slots;
}

int emu_barrier(int yes) {
    Machine *m = current();
    uint64_t now = m->barriers;
    m->yes[now & 1] |= yes != 0;
    if (++m->at_barrier == m->live) barrier_passed(m);
    else wait(m, &m->barriers, now);
    return m->yes[now & 1];
}

void emu_yield() { leave(current()); }
void emu_stop(const char *why) { fail(current(), why); }

unsigned emu_shared_address(const void *p) {
    Machine *m = current();
    const char *at = (const char *)p;
    if (at >= m->dynamic && at <= m->dynamic + m->shared_bytes) return DYNAMIC + (unsigned)(at - m->dynamic);
    if (at >= m->module.shared && at < m->module.shared_end) return (unsigned)(at - m->module.shared);
    fail(m, "an address that is not in shared memory");
}
void *emu_shared_pointer(unsigned address) {
    Machine *m = current();
    if (address >= DYNAMIC && address < DYNAMIC + m->shared_bytes) return m->dynamic + (address - DYNAMIC);
    if (address < (size_t)(m->module.shared_end - m->module.shared)) return m->module.shared + address;
    fail(m, "an address behind the end of shared memory");
}

static void arrives(const Copy &c) {
    memcpy(c.to, c.from, c.live);
    memset((char *)c.to + c.live, 0, c.bytes - c.live);
}
void emu_copy(void *to, const void *from, unsigned bytes, unsigned live) {
    Machine *m = current();
    if ((uintptr_t)to % bytes || (live && (uintptr_t)from % bytes)) fail(m, "cp.async: an address that is no multiple of its bytes");
    if (m->backwards) return arrives({to, from, bytes, live});
    Fiber *f = m->running;
    if (f->copy_count == f->copy_room) {
        f->copy_room = f->copy_room ? 2 * f->copy_room : 64;
        f->copies = (Copy *)realloc(f->copies, f->copy_room * sizeof(Copy));
    }
    f->copies[f->copy_count++] = {to, from, bytes, live};
}
void emu_copies_commit() {
    Machine *m = current();
    Fiber *f = m->running;
    unsigned grouped = 0;
    for (unsigned i = 0; i < f->group_count; i++) grouped += f->groups[i];
    if (f->group_count == 64) fail(m, "64 groups of copies under way");
    f->groups[f->group_count++] = f->copy_count - grouped;
}
void emu_copies_wait(unsigned left) {
    Fiber *f = current()->running;
    unsigned over = 0, groups = f->group_count > left ? f->group_count - left : 0;
    for (unsigned i = 0; i < groups; i++) over += f->groups[i];
    for (unsigned i = 0; i < over; i++) arrives(f->copies[i]);
    memmove(f->copies, f->copies + over, (f->copy_count - over) * sizeof(Copy));
    memmove(f->groups, f->groups + groups, (f->group_count - groups) * sizeof(unsigned));
    f->copy_count -= over, f->group_count -= groups;
}

unsigned short emu_bf16(float v) {
    uint32_t bits;
    memcpy(&bits, &v, 4);
    return v != v ? 0x7fff : (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
unsigned short emu_f16(float v) {
    _Float16 h = (_Float16)v;
    unsigned short r;
    memcpy(&r, &h, 2);
    return r;
}
float emu_wide(unsigned short v, int half) { return wide(v, half); }

void emu_ldmatrix(unsigned *r, unsigned row, int transposed) {
    Machine *m = current();
    const emu_slot *slots = emu_meet(transposed ? 11 : 10, &row, 4);
    unsigned lane = m->running->seen.index.x & 31, group = lane / 4, pair = lane % 4 * 2;
    for (unsigned i = 0; i < 4; i++) {
        auto at = [&](unsigned row, unsigned column) -> unsigned {
            uintptr_t p = (uintptr_t)emu_shared_pointer(slots[8 * i + row].word[0]);
            if (p % 16) fail(m, "ldmatrix: the address of a row is no multiple of 16");
            return ((const unsigned short *)p)[column];
        };
        r[i] = transposed ? at(pair + 1, group) << 16 | at(pair, group) : at(group, pair + 1) << 16 | at(group, pair);
    }
    emu_meet(12, r, 0); // nobody changes a row before all have read theirs
}

// Multiplications are exact and their sum is rounded once; a GPU rounds slightly more often.
void emu_mma(float *d, const unsigned *a, const unsigned *b, const float *c, int half) {
    // What this lane has of a, rows group and group + 8, columns k = 2 pair, 2 pair + 1, 2 pair + 8, 2 pair + 9; and of b, the same k.
    float own[3][4];
    for (unsigned k = 0; k < 4; k++) {
        auto at = [&](const unsigned *from, unsigned step) { return wide((unsigned short)(from[k / 2 * step] >> 16 * (k % 2)), half); };
        own[0][k] = at(a, 2), own[1][k] = at(a + 1, 2), own[2][k] = at(b, 1);
    }
    const emu_slot *slots = emu_meet(14 + half, own, sizeof own);
    unsigned lane = current()->running->seen.index.x & 31, group = lane / 4, pair = lane % 4;
    double sum[4] = {c[0], c[1], c[2], c[3]};
    for (unsigned holder = 0; holder < 4; holder++) {
        const float *left = (const float *)&slots[4 * group + holder];
        const float *first = (const float *)&slots[4 * (2 * pair) + holder] + 8, *second = (const float *)&slots[4 * (2 * pair + 1) + holder] + 8;
        for (unsigned k = 0; k < 4; k++) {
            sum[0] += (double)left[k] * first[k], sum[1] += (double)left[k] * second[k];
            sum[2] += (double)left[4 + k] * first[k], sum[3] += (double)left[4 + k] * second[k];
        }
    }
    for (unsigned i = 0; i < 4; i++) d[i] = (float)sum[i];
}

}
