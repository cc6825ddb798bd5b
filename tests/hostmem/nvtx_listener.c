/* What a profiler puts into a process to hear of NVTX ranges: it prints them to standard error.
 *
 * The package nvtx loads it where the environment variable NVTX_INJECTION64_PATH names it, and asks
 * for nothing where nobody listens.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { CALLBACKS = 1, CORE2 = 5 };
enum { PUSH = 4, POP = 5, NAME_CATEGORY = 8, REGISTER_STRING = 10, CREATE_DOMAIN = 12, START = 15 };

typedef struct {
    size_t size;
    int (*functions_of)(int module, void ****table, unsigned *size);
} callbacks_t;

typedef struct {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    uint64_t payload;
    int32_t message_type;
    const char *message; /* as registered below */
} attributes_t;

static void *create_domain(const char *name) { return strdup(name); }
static void *register_string(void *domain, const char *text) { return strdup(text); }
static void name_category(void *domain, uint32_t number, const char *name) {}
static void start(const void *reserved) {}

static int push(void *domain, const attributes_t *attributes)
{
    fprintf(stderr, "begin %s: %s\n", (char *)domain, attributes->message);
    return 0;
}

static int pop(void *domain)
{
    fprintf(stderr, "end %s\n", (char *)domain);
    return 0;
}

int InitializeInjectionNvtx2(const void *(*table_of)(uint32_t))
{
    const callbacks_t *callbacks = table_of(CALLBACKS);
    void ***functions;
    unsigned size;
    if (!callbacks || !callbacks->functions_of(CORE2, &functions, &size) || size <= START)
        return 0;
    *functions[PUSH] = push;
    *functions[POP] = pop;
    *functions[NAME_CATEGORY] = name_category;
    *functions[REGISTER_STRING] = register_string;
    *functions[CREATE_DOMAIN] = create_domain;
    *functions[START] = start;
    return 1;
}
