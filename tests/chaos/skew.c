/* A wall clock of one's own: loaded into a process (LD_PRELOAD), it adds seconds to what the
 * process reads. They stand in a shared file, one int64 for each kind of process, so that they can
 * change while it runs. The monotonic clock is left alone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const char *const kinds[] = {"gateway api", "gateway collector", "gateway control",
                                    "-m worker"};
static volatile int64_t *seconds;
static int (*real_clock)(clockid_t, struct timespec *);

__attribute__((constructor)) static void find_seconds(void) {
  char line[4096] = {0};
  int commands = open("/proc/self/cmdline", O_RDONLY);
  ssize_t length = commands < 0 ? 0 : read(commands, line, sizeof line - 1);
  close(commands);
  for (ssize_t i = 0; i < length; i++)
    if (!line[i]) line[i] = ' ';
  const char *path = getenv("BATTEN_TEST_SKEW");
  int file = path ? open(path, O_RDONLY) : -1;
  if (file < 0) return;
  int64_t *shared = mmap(0, sizeof(int64_t) * 4, PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (shared == MAP_FAILED) return;
  for (int i = 0; i < 4; i++)
    if (strstr(line, kinds[i])) seconds = shared + i;
}

int clock_gettime(clockid_t id, struct timespec *now) {
  if (!real_clock) real_clock = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int result = real_clock(id, now);
  if (seconds && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += *seconds;
  return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec precise;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &precise);
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *where) {
  struct timespec precise;
  clock_gettime(CLOCK_REALTIME, &precise);
  if (where) *where = precise.tv_sec;
  return precise.tv_sec;
}
