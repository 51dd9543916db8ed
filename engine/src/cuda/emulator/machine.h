// The interface between a kernel and the emulator. No headers are included, so that a kernel compiles in a fraction of a second.
struct emu_dim { unsigned x, y, z; };
struct emu_thread {
    emu_dim index, block, threads, grid; // threadIdx, blockIdx, blockDim, gridDim
    void *dynamic;                       // dynamic shared memory
};
// What the 32 lanes of a warp exchange in a warp-synchronous operation.
struct emu_slot { unsigned word[16]; };

extern "C" {
// Waits for all lanes of the warp, which must call it for the same operation; then each may read the values of all, until the next call.
const emu_slot *emu_meet(int what, const void *brought, unsigned bytes);
// __syncthreads_or: whether any thread passed true.
int emu_barrier(int yes);
// Lets other threads run: for loops that wait for one of them.
void emu_yield();
[[noreturn]] void emu_stop(const char *why);
unsigned emu_shared_address(const void *p);
void *emu_shared_pointer(unsigned address);
// cp.async: in one order of threads the copy happens at once, in the other only when it is waited for, so that copies that are started too early
// or read too early are both noticed.
void emu_copy(void *to, const void *from, unsigned bytes, unsigned live);
void emu_copies_commit();
void emu_copies_wait(unsigned left);
// Rounded to the nearest, ties to even.
unsigned short emu_bf16(float v);
unsigned short emu_f16(float v);
// A bf16, or an f16 where `half`.
float emu_wide(unsigned short v, int half);
void emu_ldmatrix(unsigned *r, unsigned row, int transposed);
void emu_mma(float *d, const unsigned *a, const unsigned *b, const float *c, int half);
}
