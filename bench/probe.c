/* How long calls of the CUDA driver take while the process does something else.
 *
 * One thread a kind of call makes that call again and again, with a nap in between, and notes what
 * the calls of the present window took. The threads hold no lock of an interpreter, so what they
 * wait for is the driver (and a CPU). No CUDA headers: the few entry points are declared here, and
 * looked up in the driver's library.
 *
 * One probe a process. probe.py compiles this file and declares what it calls.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

enum { ATTRIBUTE, MEMSET, MEMORY, LAUNCH, KINDS };

enum { MEMORY_TYPE = 2, NON_BLOCKING = 1, BYTES = 4096 };

#define NAP 200000        /* ns between two calls of a kind */
#define LONG_CALL 500000  /* ns from which a call counts as blocked */
#define SLACK 1000        /* ns that a nap may be late: the default of 50,000 is a quarter of it */

static const char PROGRAM[] =
    ".version 7.4\n.target sm_70\n.address_size 64\n"
    ".visible .entry nothing()\n{\n    ret;\n}\n";

typedef uint64_t address_t;
typedef void *handle_t;

/* The driver's functions that are called here, by their names in the library. */
#define FUNCTIONS(X) \
    X(init, "cuInit", (unsigned)) \
    X(device_get, "cuDeviceGet", (int *, int)) \
    X(retain, "cuDevicePrimaryCtxRetain", (handle_t *, int)) \
    X(release, "cuDevicePrimaryCtxRelease_v2", (int)) \
    X(set_current, "cuCtxSetCurrent", (handle_t)) \
    X(allocate, "cuMemAlloc_v2", (address_t *, size_t)) \
    X(deallocate, "cuMemFree_v2", (address_t)) \
    X(stream_create, "cuStreamCreate", (handle_t *, unsigned)) \
    X(stream_destroy, "cuStreamDestroy_v2", (handle_t)) \
    X(synchronize, "cuStreamSynchronize", (handle_t)) \
    X(load, "cuModuleLoadData", (handle_t *, const void *)) \
    X(unload, "cuModuleUnload", (handle_t)) \
    X(function, "cuModuleGetFunction", (handle_t *, handle_t, const char *)) \
    X(attribute, "cuPointerGetAttribute", (void *, int, address_t)) \
    X(fill, "cuMemsetD8Async", (address_t, unsigned char, size_t, handle_t)) \
    X(memory_info, "cuMemGetInfo_v2", (size_t *, size_t *)) \
    X(launch, "cuLaunchKernel", \
      (handle_t, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, handle_t, \
       void **, void **))

#define DECLARE(field, name, arguments) int(*field) arguments;
static struct { FUNCTIONS(DECLARE) } cu;

typedef struct {
    uint64_t calls;      /* that ended in the window */
    uint64_t long_calls; /* of more than LONG_CALL, the one that still runs included */
    double worst;        /* seconds of the longest call, as far as it lies in the window */
    double blocked;      /* seconds in long calls */
    double seconds;      /* since the window began */
    int answer;          /* of the driver: not 0 when the thread gave up */
} stalls_t;

struct watcher {
    pthread_t thread;
    pthread_mutex_t lock;
    stalls_t seen;
    int64_t window; /* when it began */
    int64_t began;  /* of the call that runs now; 0: none */
    handle_t stream;
    int kind;
    int ready; /* its first call, which loads things, is over */
};

static struct watcher watchers[KINDS];
static unsigned running; /* kinds, as bits */
static atomic_int over;
static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t one_ready = PTHREAD_COND_INITIALIZER;
static int device;
static handle_t context, module, kernel;
static address_t memory;

static int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static int call(const struct watcher *w)
{
    unsigned type;
    size_t free, total;
    int answer;
    switch (w->kind) {
    case ATTRIBUTE:
        return cu.attribute(&type, MEMORY_TYPE, memory);
    case MEMSET:
        answer = cu.fill(memory, 1, BYTES, w->stream);
        return answer ? answer : cu.synchronize(w->stream);
    case MEMORY:
        return cu.memory_info(&free, &total);
    default:
        answer = cu.launch(kernel, 1, 1, 1, 1, 1, 1, 0, w->stream, NULL, NULL);
        return answer ? answer : cu.synchronize(w->stream);
    }
}

/* Add what a call took, from its begin or the window's, whichever is later. */
static void add(stalls_t *seen, int64_t began, int64_t window, int64_t end)
{
    int64_t took = end - (began > window ? began : window);
    if (took * 1e-9 > seen->worst)
        seen->worst = took * 1e-9;
    if (took > LONG_CALL) {
        seen->long_calls++;
        seen->blocked += took * 1e-9;
    }
}

static void *watch(void *argument)
{
    struct watcher *w = argument;
    const struct timespec nap = {0, NAP};
    prctl(PR_SET_TIMERSLACK, SLACK, 0, 0, 0);
    int answer = cu.set_current(context);
    if (!answer)
        answer = call(w);
    pthread_mutex_lock(&w->lock);
    w->seen.answer = answer;
    w->window = now();
    pthread_mutex_unlock(&w->lock);
    pthread_mutex_lock(&starting);
    w->ready = 1;
    pthread_cond_signal(&one_ready);
    pthread_mutex_unlock(&starting);

    while (!answer && !atomic_load(&over)) {
        pthread_mutex_lock(&w->lock);
        w->began = now();
        pthread_mutex_unlock(&w->lock);
        answer = call(w);
        pthread_mutex_lock(&w->lock);
        w->seen.calls++;
        w->seen.answer = answer;
        add(&w->seen, w->began, w->window, now());
        w->began = 0;
        pthread_mutex_unlock(&w->lock);
        nanosleep(&nap, NULL);
    }
    return NULL;
}

static int say(char *message, size_t room, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, room, format, arguments);
    va_end(arguments);
    return -1;
}

static int look_up(const char *library, char *message, size_t room)
{
    void *found = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!found)
        return say(message, room, "%s", dlerror());
#define FIND(field, name, arguments) \
    if (!(*(void **)&cu.field = dlsym(found, name))) \
        return say(message, room, "the driver has no %s", name);
    FUNCTIONS(FIND)
    return 0;
}

#define TRY(text, expression) \
    do { \
        int answer = (expression); \
        if (answer) \
            return say(message, room, "%s: the driver answered %d", text, answer); \
    } while (0)

static int prepare(int ordinal, char *message, size_t room)
{
    TRY("cuInit", cu.init(0));
    TRY("cuDeviceGet", cu.device_get(&device, ordinal));
    TRY("cuDevicePrimaryCtxRetain", cu.retain(&context, device));
    TRY("cuCtxSetCurrent", cu.set_current(context));
    TRY("cuMemAlloc", cu.allocate(&memory, BYTES));
    TRY("cuModuleLoadData", cu.load(&module, PROGRAM));
    TRY("cuModuleGetFunction", cu.function(&kernel, module, "nothing"));
    for (int kind = 0; kind < KINDS; kind++)
        TRY("cuStreamCreate", cu.stream_create(&watchers[kind].stream, NON_BLOCKING));
    return 0;
}

struct start {
    const char *library;
    int ordinal;
    char *message;
    size_t room;
    int answer;
};

/* On a thread of its own, so that no context stays current on the caller's. */
static void *prepare_aside(void *argument)
{
    struct start *s = argument;
    s->answer = look_up(s->library, s->message, s->room);
    if (!s->answer)
        s->answer = prepare(s->ordinal, s->message, s->room);
    return NULL;
}

/* Stop the threads, once their present calls have ended, and give everything back. */
void probe_stop(void)
{
    atomic_store(&over, 1);
    for (int kind = 0; kind < KINDS; kind++)
        if (running & 1u << kind)
            pthread_join(watchers[kind].thread, NULL);
    running = 0;
    for (int kind = 0; kind < KINDS; kind++)
        if (watchers[kind].stream)
            cu.stream_destroy(watchers[kind].stream);
    if (module)
        cu.unload(module);
    if (memory)
        cu.deallocate(memory);
    if (context)
        cu.release(device);
    memset(watchers, 0, sizeof watchers);
    module = kernel = context = NULL;
    memory = 0;
}

/* Begin to make the calls of some kinds (as bits) on a device, each once before this returns.
 * Returns 0, or -1 and a message. */
int probe_start(const char *library, int ordinal, unsigned kinds, char *message, size_t room)
{
    if (running)
        return say(message, room, "a probe runs in this process already");
    struct start start = {library, ordinal, message, room, 0};
    pthread_t aside;
    if (pthread_create(&aside, NULL, prepare_aside, &start))
        return say(message, room, "no more threads");
    pthread_join(aside, NULL);
    if (start.answer) {
        probe_stop();
        return -1;
    }
    atomic_store(&over, 0);
    for (int kind = 0; kind < KINDS; kind++) {
        struct watcher *w = &watchers[kind];
        if (!(kinds & 1u << kind))
            continue;
        w->kind = kind;
        pthread_mutex_init(&w->lock, NULL);
        if (pthread_create(&w->thread, NULL, watch, w)) {
            probe_stop();
            return say(message, room, "no more threads");
        }
        running |= 1u << kind;
    }
    pthread_mutex_lock(&starting);
    for (int kind = 0; kind < KINDS; kind++)
        while (running & 1u << kind && !watchers[kind].ready)
            pthread_cond_wait(&one_ready, &starting);
    pthread_mutex_unlock(&starting);
    return 0;
}

/* Begin a window: what was noted is forgotten, and of a call that runs only the rest counts. */
void probe_reset(void)
{
    for (int kind = 0; kind < KINDS; kind++) {
        struct watcher *w = &watchers[kind];
        if (!(running & 1u << kind))
            continue;
        pthread_mutex_lock(&w->lock);
        int answer = w->seen.answer;
        w->seen = (stalls_t){.answer = answer};
        w->window = now();
        pthread_mutex_unlock(&w->lock);
    }
}

/* Give what the calls of a kind took since the window began, up to now. */
void probe_read(int kind, stalls_t *seen)
{
    struct watcher *w = &watchers[kind];
    pthread_mutex_lock(&w->lock);
    int64_t end = now();
    *seen = w->seen;
    seen->seconds = (end - w->window) * 1e-9;
    if (w->began)
        add(seen, w->began, w->window, end);
    pthread_mutex_unlock(&w->lock);
}
