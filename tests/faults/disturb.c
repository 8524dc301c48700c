// Preloaded into `san run` by tests/faults/soak.py: delays fsync, as a control file with one double (seconds) says.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static double seconds(void) {
  static volatile const double* shared;
  static const double none;
  if (!shared) {
    const char* path = getenv("SOAK_CONTROL");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void* at = file < 0 ? MAP_FAILED : mmap(0, sizeof none, PROT_READ, MAP_SHARED, file, 0);
    if (file >= 0) close(file);
    shared = at == MAP_FAILED ? &none : at;
  }
  return *shared;
}

int fsync(int file) {
  usleep((useconds_t)(seconds() * 1e6));
  return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(file);
}

int fdatasync(int file) {
  usleep((useconds_t)(seconds() * 1e6));
  return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(file);
}
