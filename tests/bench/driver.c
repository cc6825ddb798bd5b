/* A libcuda.so.1 for machines without one: it answers yes, and registers by waiting.
 *
 * As the real driver, it holds a lock of the process while it registers or allocates host memory,
 * and the calls that a probe makes take that lock, too. A test tells it what to do by files in the
 * folder that the environment variable STUB_FOLDER names:
 *
 *   hold.NAME    calls of NAME last until it is gone, after having made a file held.NAME
 *   refuse.NAME  calls of NAME answer the number in it
 *
 * STUB_MICROSECONDS is what registering or allocating a MiB of host memory takes.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef uint64_t address_t;
typedef void *handle_t;

enum { OUT_OF_MEMORY = 2, NOT_SUPPORTED = 801 };
enum { HOLD_AT_MOST = 200000 }; /* times 100 us and more: a test that failed must not hang */

static pthread_mutex_t driver = PTHREAD_MUTEX_INITIALIZER;
static char some[64]; /* whose addresses are handles and device memory */

static int begin(const char *name)
{
    const char *folder = getenv("STUB_FOLDER");
    char path[4096];
    int answer = 0;
    if (!folder)
        return 0;
    snprintf(path, sizeof path, "%s/hold.%s", folder, name);
    if (!access(path, F_OK)) {
        char held[4096];
        snprintf(held, sizeof held, "%s/held.%s", folder, name);
        close(open(held, O_CREAT | O_WRONLY, 0600));
        for (int i = 0; i < HOLD_AT_MOST && !access(path, F_OK); i++)
            usleep(100);
    }
    snprintf(path, sizeof path, "%s/refuse.%s", folder, name);
    FILE *file = fopen(path, "r");
    if (file) {
        if (fscanf(file, "%d", &answer) != 1)
            answer = 1;
        fclose(file);
    }
    return answer;
}

static int locked(const char *name, size_t bytes)
{
    const char *cost = getenv("STUB_MICROSECONDS");
    pthread_mutex_lock(&driver);
    int answer = begin(name);
    if (cost && bytes)
        usleep(atol(cost) * (bytes >> 20));
    pthread_mutex_unlock(&driver);
    return answer;
}

static int give(handle_t *handle)
{
    *handle = some;
    return 0;
}

int cuInit(unsigned flags) { return begin("cuInit"); }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int room, int device) { snprintf(name, room, "stub"); return 0; }
int cuDeviceGetPCIBusId(char *id, int room, int device)
{
    snprintf(id, room, "0000:00:00.0");
    return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    *value = attribute == 134 ? -1 : 1; /* the node is not known */
    return 0;
}
int cuGetErrorName(int code, const char **name) { *name = "CUDA_ERROR_OF_THE_STUB"; return 0; }
int cuDevicePrimaryCtxRetain(handle_t *context, int device) { return give(context); }
int cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
int cuCtxPushCurrent_v2(handle_t context) { return 0; }
int cuCtxPopCurrent_v2(handle_t *context) { return give(context); }
int cuCtxSetCurrent(handle_t context) { return 0; }

int cuMemHostRegister_v2(void *at, size_t bytes, unsigned flags)
{
    return locked("cuMemHostRegister", bytes);
}
int cuMemHostUnregister(void *at) { return locked("cuMemHostUnregister", 0); }
int cuMemHostGetDevicePointer_v2(address_t *to, void *at, unsigned flags)
{
    *to = (address_t)(uintptr_t)at;
    return 0;
}
int cuMemHostAlloc(void **to, size_t bytes, unsigned flags)
{
    *to = aligned_alloc(4096, bytes);
    return *to ? locked("cuMemHostAlloc", bytes) : OUT_OF_MEMORY;
}
int cuMemFreeHost(void *at)
{
    free(at);
    return begin("cuMemFreeHost");
}

int cuMemAddressReserve(address_t *to, size_t bytes, size_t a, address_t at, uint64_t flags)
{
    void *found = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    *to = (address_t)(uintptr_t)found;
    return found == MAP_FAILED ? OUT_OF_MEMORY : 0;
}
int cuMemAddressFree(address_t at, size_t bytes) { return munmap((void *)(uintptr_t)at, bytes); }
int cuMemCreate(uint64_t *handle, size_t bytes, const void *properties, uint64_t flags)
{
    *handle = 1;
    return begin("cuMemCreate");
}
int cuMemRelease(uint64_t handle) { return 0; }
int cuMemMap(address_t at, size_t bytes, size_t o, uint64_t handle, uint64_t flags) { return 0; }
int cuMemUnmap(address_t at, size_t bytes) { return 0; }
int cuMemSetAccess(address_t at, size_t bytes, const void *access, size_t count) { return 0; }

int cuMemAlloc_v2(address_t *to, size_t bytes) { *to = (address_t)(uintptr_t)some; return 0; }
int cuMemFree_v2(address_t at) { return 0; }
int cuMemGetInfo_v2(size_t *left, size_t *total)
{
    *left = *total = (size_t)1 << 30;
    return locked("cuMemGetInfo", 0);
}
int cuPointerGetAttribute(void *data, int attribute, address_t at)
{
    *(unsigned *)data = 2;
    return locked("cuPointerGetAttribute", 0);
}
int cuStreamCreate(handle_t *stream, unsigned flags) { return give(stream); }
int cuStreamDestroy_v2(handle_t stream) { return 0; }
int cuStreamSynchronize(handle_t stream) { return begin("cuStreamSynchronize"); }
int cuMemsetD8Async(address_t at, unsigned char value, size_t bytes, handle_t stream)
{
    return locked("cuMemsetD8Async", 0);
}
int cuMemcpyAsync(address_t to, address_t from, size_t bytes, handle_t stream) { return 0; }
int cuModuleLoadData(handle_t *module, const void *image) { return give(module); }
int cuModuleUnload(handle_t module) { return 0; }
int cuModuleGetFunction(handle_t *function, handle_t module, const char *name)
{
    return give(function);
}
int cuLaunchKernel(handle_t f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, handle_t stream, void **arguments, void **extra)
{
    return locked("cuLaunchKernel", 0);
}

#define NAMED(name) {#name, (void *)name}
#define VERSION_2(name) {#name, (void *)name##_v2}
static const struct {
    const char *name;
    void *function;
} functions[] = {
    NAMED(cuInit), NAMED(cuDriverGetVersion), NAMED(cuDeviceGetCount), NAMED(cuDeviceGet),
    NAMED(cuDeviceGetName), NAMED(cuDeviceGetPCIBusId), NAMED(cuDeviceGetAttribute),
    NAMED(cuGetErrorName), NAMED(cuDevicePrimaryCtxRetain), VERSION_2(cuDevicePrimaryCtxRelease),
    VERSION_2(cuCtxPushCurrent), VERSION_2(cuCtxPopCurrent), NAMED(cuCtxSetCurrent),
    VERSION_2(cuMemHostRegister), NAMED(cuMemHostUnregister), VERSION_2(cuMemHostGetDevicePointer),
    NAMED(cuMemHostAlloc), NAMED(cuMemFreeHost), NAMED(cuMemAddressReserve),
    NAMED(cuMemAddressFree), NAMED(cuMemCreate), NAMED(cuMemRelease), NAMED(cuMemMap),
    NAMED(cuMemUnmap), NAMED(cuMemSetAccess), VERSION_2(cuMemAlloc), VERSION_2(cuMemFree),
    VERSION_2(cuMemGetInfo), NAMED(cuPointerGetAttribute), NAMED(cuStreamCreate),
    VERSION_2(cuStreamDestroy), NAMED(cuStreamSynchronize), NAMED(cuMemsetD8Async),
    NAMED(cuMemcpyAsync), NAMED(cuModuleLoadData), NAMED(cuModuleUnload),
    NAMED(cuModuleGetFunction), NAMED(cuLaunchKernel),
};

static int unknown(void) { return NOT_SUPPORTED; }

/* Functions that are not here can be had, so that a library finds all it asks for, and refuse. */
int cuGetProcAddress_v2(const char *name, void **to, int version, uint64_t flags, int *status)
{
    *to = (void *)unknown;
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (!strcmp(functions[i].name, name))
            *to = functions[i].function;
    return 0;
}
