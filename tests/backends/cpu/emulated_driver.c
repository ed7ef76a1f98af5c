/* Calls one kernel's `handler` as XLA would, in a process of another CPU.

   stdin: the number of threads, of operands and of results; the operands' sizes; for
   each result its size and the operand whose memory it shares, or -1; the operands'
   elements. stdout: the results' elements. Offsets come from handler.py and threads.py.
   Exits with 1 and the kernel's message where it reports an error, with 2 where it
   wrote past the end of a buffer. */

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PAST_THE_END = 64, RUBBISH = 0xA5, MOST_THREADS = 64 };

extern void *handler(void *frame);
void *pallasite_spare;
void *pallasite_recorder;
void pallasite_print(void *a, void *b, void *c) {}

static int64_t pool;
static pthread_t started[MOST_THREADS];
static int started_count;

static void *field(void *base, int offset) { return *(void **)((char *)base + offset); }

static void set(void *base, int offset, void *value) {
  *(void **)((char *)base + offset) = value;
}

static void *make_error(void *args) {
  fprintf(stderr, "%s\n", (char *)field(args, 16));
  return args;
}

static void *schedule(void *args) {
  void *(*task)(void *) = field(args, 24);
  if (started_count == MOST_THREADS ||
      pthread_create(&started[started_count++], NULL, task, field(args, 32)))
    abort();
  return NULL;
}

static void *number_of_threads(void *args) {
  *(int64_t *)field(args, 24) = pool;
  return NULL;
}

static void read_all(void *to, size_t size) {
  if (size && fread(to, size, 1, stdin) != 1) abort();
}

static int64_t read_number(void) {
  int64_t number;
  read_all(&number, sizeof number);
  return number;
}

static char *new_buffer(int64_t size) {
  char *data = malloc(size + PAST_THE_END);
  return memset(data, RUBBISH, size + PAST_THE_END);
}

static void check_end(const char *data, int64_t size) {
  for (int n = 0; n < PAST_THE_END; n++)
    if ((unsigned char)data[size + n] != RUBBISH) {
      fprintf(stderr, "written past the end of a buffer of %ld bytes\n", (long)size);
      exit(2);
    }
}

/* What the frame says of operands or results: a table of XLA_FFI_Buffer. */
static void **buffers(char **data, int64_t count) {
  void **table = calloc(count + 1, sizeof *table);
  for (int64_t n = 0; n < count; n++) {
    table[n] = calloc(1, 64);
    set(table[n], BUFFER_DATA, data[n]);
  }
  return table;
}

int main(void) {
  pool = read_number();
  int64_t arguments = read_number(), results = read_number();
  int64_t *sizes = calloc(arguments + results + 1, sizeof *sizes);
  char **data = calloc(arguments + results + 1, sizeof *data);
  for (int64_t n = 0; n < arguments; n++) data[n] = new_buffer(sizes[n] = read_number());
  for (int64_t n = arguments; n < arguments + results; n++) {
    sizes[n] = read_number();
    int64_t shared = read_number();
    data[n] = shared < 0 ? new_buffer(sizes[n]) : data[shared];
  }
  for (int64_t n = 0; n < arguments; n++) read_all(data[n], sizes[n]);

  char api[512] = {0}, frame[512] = {0};
  set(api, API_ERROR_CREATE, make_error);
  set(api, API_SCHEDULE, schedule);
  set(api, API_NUM_THREADS, number_of_threads);
  set(frame, FRAME_API, api);
  *(int32_t *)(frame + FRAME_STAGE) = EXECUTE;
  *(int64_t *)(frame + FRAME_ARGS_COUNT) = arguments;
  *(int64_t *)(frame + FRAME_RESULTS_COUNT) = results;
  set(frame, FRAME_ARGS, buffers(data, arguments));
  set(frame, FRAME_RESULTS, buffers(data + arguments, results));
  void *error = handler(frame);
  for (int n = 0; n < started_count; n++) pthread_join(started[n], NULL);
  if (error) return 1;

  for (int64_t n = 0; n < arguments + results; n++) check_end(data[n], sizes[n]);
  for (int64_t n = arguments; n < arguments + results; n++)
    fwrite(data[n], 1, sizes[n], stdout);
  return 0;
}
