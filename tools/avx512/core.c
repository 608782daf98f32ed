// What stands between the Bochs processor of `bochscpu-python` and avx512.py: guest memory, and when the processor stops.
// No emulator and no system calls. That library calls the functions `bx_instr_*`, `mem_*` and some others by
// name; loaded before it, those here take the place of its own, which look up tables and call Python at each instruction.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STOP_EXCEPTION = 1, STOP_BUDGET = 2, STOP_HALT = 3 };
enum { SEGMENT_FS = 4, SEGMENT_GS = 5, DATA_SEGMENT = 0xcf3 };

// Layout known to machine.py.
struct machine {
    uint64_t registers[16];  // in the order of their encodings: rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8...
    uint64_t rip, flags, fs, gs;
    uint64_t stop, vector, error, address;  // why the last run ended, and what a page fault touched
    uint64_t start;                         // where the instruction that raised the exception begins
    uint64_t count, budget;                 // instructions so far; where to stop
    uint8_t *memory;                        // guest address 0
    uint64_t size;
};

static struct machine machine;

static uint64_t *previous_rip;
static void *library;
static void *(*create_model)(void *);
static void (*count_down)(void);
static uint32_t *ticks;

#define FUNCTIONS(X)                                                   \
    X(void, cpu_new, (unsigned))                                       \
    X(void, cpu_loop, (unsigned))                                      \
    X(void, cpu_bail, (unsigned))                                      \
    X(void, cpu_set_mode, (unsigned))                                  \
    X(unsigned, cpu_killbit, (unsigned))                               \
    X(void, cpu_set_killbit, (unsigned))                               \
    X(void, cpu_clear_killbit, (unsigned))                             \
    X(uint64_t, cpu_get_pc, (unsigned))                                \
    X(void, cpu_set_pc, (unsigned, uint64_t))                          \
    X(uint64_t, cpu_get_reg64, (unsigned, unsigned))                   \
    X(void, cpu_set_reg64, (unsigned, unsigned, uint64_t))             \
    X(uint32_t, cpu_get_eflags, (unsigned))                            \
    X(void, cpu_set_eflags, (unsigned, uint32_t))                      \
    X(uint64_t, cpu_get_cr2, (unsigned))                               \
    X(void, cpu_set_seg, (unsigned, unsigned, uint32_t, uint16_t, uint64_t, uint32_t, uint16_t))

#define DECLARE(result, name, arguments) static result(*p_##name) arguments;
FUNCTIONS(DECLARE)
static void (*force_flags)(void), (*flush_code)(void);

// Loads the library and makes a processor of the model that the function `create` of the library describes; an error in
// words, or null.
const char *core_open(const char *path, const char *create)
{
    static char message[512];
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return dlerror();
#define FIND(result, name, arguments)                                      \
    p_##name = (result(*) arguments)dlsym(library, #name);                 \
    if (!p_##name) {                                                       \
        snprintf(message, sizeof message, "%s has no " #name, path);       \
        return message;                                                    \
    }
    FUNCTIONS(FIND)
    force_flags = (void (*)(void))dlsym(library, "_ZN8BX_CPU_C11force_flagsEv");
    flush_code = (void (*)(void))dlsym(library, "_Z12flushICachesv");
    uint64_t *words = dlsym(library, "bx_cpu");
    if (!force_flags || !flush_code || !words)
        return "the library has other functions of Bochs than are known here";
    // A jump goes on in the processor's inner loop while there are ticks left until the next timer; the library has no
    // timers and always leaves one tick. Where that is kept shows what its function writes. Without it all is slower.
    uint32_t *clock = dlsym(library, "bx_pc_system");
    count_down = (void (*)(void))dlsym(library, "_ZN14bx_pc_system_c14countdownEventEv");
    if (!clock || !count_down)
        return "the library has other timers than are known here";
    for (unsigned i = 0; i < 1438 && !ticks; i++) {  // all of it
        uint32_t before = clock[i];
        clock[i] = 2;
        count_down();
        if (clock[i] == 1)
            ticks = clock + i;
        else
            clock[i] = before;
    }
    create_model = (void *(*)(void *))dlsym(library, create);
    if (!create_model) {
        snprintf(message, sizeof message, "the library has no %s", create);
        return message;
    }
    p_cpu_new(0);
    // Setting the instruction pointer sets the start of the current instruction too, which has no getter.
    const uint64_t mark = 0x00005a17c0de5a17;
    p_cpu_set_pc(0, mark);
    unsigned found = 0;
    for (unsigned i = 0; i < 512; i++)
        if (words[i] == mark && found++ == 1)
            previous_rip = words + i;
    return found == 2 ? NULL : "the processor is laid out otherwise than is known here";
}

struct machine *core_machine(void) { return &machine; }

void *core_symbol(const char *name) { return dlsym(library, name); }

static void stop(uint64_t why)
{
    machine.stop = why;
    p_cpu_set_killbit(0);
}

// Runs until an exception or until `count` reaches `budget`.
void core_run(void)
{
    for (unsigned i = 0; i < 16; i++)
        p_cpu_set_reg64(0, i, machine.registers[i]);
    p_cpu_set_pc(0, machine.rip);
    p_cpu_set_eflags(0, (uint32_t)machine.flags);
    p_cpu_set_seg(0, SEGMENT_FS, 1, 0, machine.fs, 0xffffffff, DATA_SEGMENT);
    p_cpu_set_seg(0, SEGMENT_GS, 1, 0, machine.gs, 0xffffffff, DATA_SEGMENT);
    machine.stop = 0;
    p_cpu_clear_killbit(0);
    while (!p_cpu_killbit(0))
        p_cpu_loop(0);
    for (unsigned i = 0; i < 16; i++)
        machine.registers[i] = p_cpu_get_reg64(0, i);
    machine.rip = p_cpu_get_pc(0);
    force_flags();
    machine.flags = p_cpu_get_eflags(0);
}

// After a change of page tables; `code` if what was executable may have changed.
void core_flush(int code)
{
    p_cpu_set_mode(0);
    if (code)
        flush_code();
}

// Called by the library.

// Describes the model that the library was built to emulate, a Cannon Lake, which has no VNNI.
void *_Z23create_corei3_cnl_cpuidP8BX_CPU_C(void *cpu) { return create_model(cpu); }

void bx_instr_before_execution(unsigned cpu, void *instruction)
{
    (void)cpu, (void)instruction;
    if (++machine.count >= machine.budget)
        stop(STOP_BUDGET);
}

void bx_instr_exception(unsigned cpu, unsigned vector, unsigned error)
{
    machine.vector = vector;
    machine.error = error;
    machine.start = *previous_rip;
    machine.address = p_cpu_get_cr2(cpu);
    stop(STOP_EXCEPTION);
    p_cpu_bail(cpu);
}

void bx_instr_hlt(unsigned cpu)
{
    (void)cpu;
    stop(STOP_HALT);
}

#define IGNORED(name) void bx_instr_##name(void) {}
IGNORED(init_env) IGNORED(exit_env) IGNORED(initialize) IGNORED(exit) IGNORED(reset) IGNORED(mwait)
IGNORED(cnear_branch_taken) IGNORED(cnear_branch_not_taken) IGNORED(ucnear_branch) IGNORED(far_branch)
IGNORED(opcode) IGNORED(interrupt) IGNORED(hwinterrupt) IGNORED(tlb_cntrl) IGNORED(cache_cntrl)
IGNORED(prefetch_hint) IGNORED(clflush) IGNORED(after_execution) IGNORED(repeat_iteration) IGNORED(inp)
IGNORED(inp2) IGNORED(outp) IGNORED(lin_access) IGNORED(phy_access) IGNORED(wrmsr) IGNORED(vmexit)

void _ZN14bx_pc_system_c14countdownEventEv(void)
{
    if (ticks)
        *ticks = 1 << 30;
    else
        count_down();
}

uint8_t *mem_guest_to_host(unsigned cpu, uint64_t address, unsigned access)
{
    (void)cpu, (void)access;
    address &= 0x000fffffffffffff;  // the library sets bits above
    if (address >= machine.size) {
        fprintf(stderr, "avx512: physical address %#llx is not memory\n", (unsigned long long)address);
        abort();
    }
    return machine.memory + address;
}

void mem_read_phy(unsigned cpu, uint64_t address, unsigned size, void *to)
{
    memcpy(to, mem_guest_to_host(cpu, address, 0), size);
}

void mem_write_phy(unsigned cpu, uint64_t address, unsigned size, const void *from)
{
    memcpy(mem_guest_to_host(cpu, address, 1), from, size);
}

// The library is built against a newer C library than it needs.

unsigned long long __isoc23_strtoull(const char *s, char **end, int base) { return strtoull(s, end, base); }

int __isoc23_sscanf(const char *s, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    int n = vsscanf(s, format, list);
    va_end(list);
    return n;
}
