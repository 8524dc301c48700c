// Preloaded into `san run` by tests/faults/soak.py: shifts the wall clock and delays fsync, as a control file says.
// The file holds two doubles: the shift and the delay, in seconds.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const double* control(void) {
  static volatile const double* shared;
  static const double none[2];
  if (!shared) {
    const char* path = getenv("SOAK_CONTROL");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void* at = file < 0 ? MAP_FAILED : mmap(0, sizeof none, PROT_READ, MAP_SHARED, file, 0);
    if (file >= 0) close(file);
    shared = at == MAP_FAILED ? none : at;
  }
  return shared;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int clock_gettime(clockid_t clock, struct timespec* now) {
  static int (*real)(clockid_t, struct timespec*);
  if (!real) real = REAL(clock_gettime);
  int result = real(clock, now);
  if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += (time_t)control()[0];
  return result;
}

int gettimeofday(struct timeval* restrict now, void* restrict zone) {
  struct timespec time;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &time);
  now->tv_sec = time.tv_sec, now->tv_usec = time.tv_nsec / 1000;
  return 0;
}

time_t time(time_t* out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}

static void delay(void) { usleep((useconds_t)(control()[1] * 1e6)); }

int fsync(int file) {
  delay();
  return REAL(fsync)(file);
}

int fdatasync(int file) {
  delay();
  return REAL(fdatasync)(file);
}
