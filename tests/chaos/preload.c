/* Loaded into redis-server by LD_PRELOAD: its wall clock is wrong, and its disk slow, as a file says.

   CHAOS_REDIS names a file of two doubles that may be written at any time: the seconds by which the
   clock is wrong, and those that each synchronisation of a file takes in addition. While it lasts,
   writes to that file wait, as on a busy disk. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile double *settings;
static atomic_int synchronised = -1; /* the descriptor of the file, -1: none */

__attribute__((constructor)) static void map_settings(void) {
  const char *path = getenv("CHAOS_REDIS");
  int file = path ? open(path, O_RDONLY) : -1;
  if (file < 0) return;
  void *found = mmap(NULL, 2 * sizeof(double), PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (found != MAP_FAILED) settings = found;
}

static void shift(time_t *seconds, long *parts, long parts_each_second) {
  if (!settings) return;
  double whole = floor(settings[0]);
  *seconds += (time_t)whole;
  *parts += (long)((settings[0] - whole) * parts_each_second);
  if (*parts >= parts_each_second) {
    *parts -= parts_each_second;
    ++*seconds;
  }
}

int gettimeofday(struct timeval *restrict found, void *restrict zone) {
  static int (*real)(struct timeval *, void *);
  if (!real) real = dlsym(RTLD_NEXT, "gettimeofday");
  int status = real(found, zone);
  if (!status) shift(&found->tv_sec, &found->tv_usec, 1000000);
  return status;
}

int clock_gettime(clockid_t clock, struct timespec *found) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int status = real(clock, found);
  if (!status && clock == CLOCK_REALTIME) shift(&found->tv_sec, &found->tv_nsec, 1000000000);
  return status;
}

static void delay(int file) {
  if (!settings || settings[1] <= 0) return;
  synchronised = file;
  usleep((useconds_t)(settings[1] * 1e6));
  synchronised = -1;
}

int fsync(int file) {
  static int (*real)(int);
  if (!real) real = dlsym(RTLD_NEXT, "fsync");
  delay(file);
  return real(file);
}

int fdatasync(int file) {
  static int (*real)(int);
  if (!real) real = dlsym(RTLD_NEXT, "fdatasync");
  delay(file);
  return real(file);
}

ssize_t write(int file, const void *bytes, size_t count) {
  static ssize_t (*real)(int, const void *, size_t);
  if (!real) real = dlsym(RTLD_NEXT, "write");
  while (synchronised == file) usleep(1000);
  return real(file, bytes, count);
}
