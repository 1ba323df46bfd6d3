/* A driver's library with one device, as nvidia-ml-py calls it. Built with or without parts of it:
   -DNO_GPM_DEVICE: the device has no hardware counters; -DOLD_DRIVER: functions of newer drivers are not there;
   -DFORBIDDEN: counters are for administrators; -DDYING: the device is lost after three reads of its clocks. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, INSUFFICIENT = 7, LOST = 15 };
typedef struct { unsigned id, scope; long long at, latency; unsigned type, result; union { double d; unsigned u; unsigned long long ull; } value; } field;
typedef struct { unsigned id, result; double value; char *names[3]; } metric;
typedef struct { unsigned version, count; int *first, *second; metric metrics[]; } metrics;

static int open_count, ticks, alive;
int nvmlInitWithFlags(unsigned flags) { (void)flags; open_count++; return SUCCESS; }
int nvmlShutdown(void) { open_count--; return SUCCESS; }
int stub_open(void) { return open_count; }
int stub_samples(void) { return alive; }
const char *nvmlErrorString(int code) { return code == NOT_SUPPORTED ? "Not Supported" : "stub error"; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) { *device = &ticks; return strcmp(uuid, "GPU-stub") ? NOT_FOUND : SUCCESS; }
int nvmlDeviceGetClockInfo(void *device, int type, unsigned *mhz) {
  (void)device;
#ifdef DYING
  static int clock_reads;
  if (++clock_reads > 6) return LOST;
#endif
  *mhz = type == 1 ? 1980 : 2619; return SUCCESS;
}
int nvmlDeviceGetUtilizationRates(void *device, unsigned *found) { (void)device; (void)found; return NOT_SUPPORTED; }
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *found) { (void)device; found[0] = 80ull << 30; found[1] = 60ull << 30; found[2] = 20ull << 30; return SUCCESS; }
int nvmlDeviceGetFieldValues(void *device, int count, field *fields) {
  (void)device;
  static unsigned long long bytes;
  bytes += 1000000;
  for (int n = 0; n < count; n++) {
    fields[n].result = fields[n].id == 198 ? NOT_SUPPORTED : SUCCESS;
    fields[n].type = fields[n].id == 197 ? 3 : 1;
    if (fields[n].id == 197) fields[n].value.ull = bytes; else fields[n].value.u = 350000;
  }
  return SUCCESS;
}
int nvmlDeviceGetPcieThroughput(void) { abort(); } /* it takes 20 ms */
#ifndef OLD_DRIVER
int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *reasons) { (void)device; *reasons = 0x4; return SUCCESS; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, void *found) { (void)device; if (!found) { *count = 2; return INSUFFICIENT; } *count = 2; return SUCCESS; }
int nvmlGpmQueryDeviceSupport(void *device, unsigned *support) {
  (void)device;
#ifdef NO_GPM_DEVICE
  support[1] = 0;
#else
  support[1] = 1;
#endif
  return SUCCESS;
}
int nvmlGpmSampleAlloc(int **sample) { *sample = calloc(1, sizeof(int)); alive++; return SUCCESS; }
int nvmlGpmSampleFree(int *sample) { free(sample); alive--; return SUCCESS; }
int nvmlGpmSampleGet(void *device, int *sample) {
  (void)device;
#ifdef FORBIDDEN
  (void)sample; return NO_PERMISSION;
#else
  *sample = ++ticks; return SUCCESS;
#endif
}
int nvmlGpmMetricsGet(metrics *asked) {
  if (asked->version != 1 || *asked->second != *asked->first + 1) return INVALID; /* neighbours in time, in order */
  for (unsigned n = 0; n < asked->count; n++) {
    metric *m = &asked->metrics[n];
    m->result = m->id == 174 ? INVALID : SUCCESS; /* this driver does not know it */
    m->value = m->id == 2 ? 80 : m->id == 3 ? 30 : m->id == 20 ? 3 : m->id;
  }
  return SUCCESS;
}
#endif
