/* The runtime through kilat.h alone, in plain C; run under sanitizers by `make native-check`. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../include/kilat.h"
#include "tiny_gguf.h"

static _Atomic int checks;
#define CHECK(condition)                                                                   \
  do {                                                                                     \
    checks++;                                                                              \
    if (!(condition)) {                                                                    \
      fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);              \
      exit(1);                                                                             \
    }                                                                                      \
  } while (0)

static char folder[64], model_path[96];

static void write_file(const char *path, const void *data, size_t n) {
  FILE *f = fopen(path, "wb");
  CHECK(f && fwrite(data, 1, n, f) == n && fclose(f) == 0);
}

static kilat_model *open_tiny(const kilat_options *options) {
  kilat_model *m;
  int status = kilat_open(model_path, options, &m);
  if (status) fprintf(stderr, "%s\n", kilat_model_error(m));
  CHECK(status == KILAT_OK);
  return m;
}

static kilat_session *session_of(kilat_model *m, int64_t context, int64_t flags) {
  kilat_session_options options = {context, flags};
  kilat_session *s;
  CHECK(kilat_session_create(m, &options, &s) == KILAT_OK);
  return s;
}

static const kilat_sampling greedy = {0, 1, 0, 0, 0};

static void test_facts_are_those_of_the_file(kilat_model *m) {
  kilat_info info;
  CHECK(kilat_model_info(m, &info) == KILAT_OK);
  CHECK(!strcmp(info.architecture, "llama") && info.vocab == TINY_VOCAB && info.layers == TINY_LAYERS &&
        info.hidden == TINY_HIDDEN);
  CHECK(info.max_context == TINY_CONTEXT && info.n_end_ids == 1 && info.end_ids[0] == TINY_VOCAB - 1 && info.bos_id == -1);
  CHECK(kilat_version() == KILAT_VERSION && !strcmp(kilat_status_name(KILAT_BAD_FILE), "bad file"));
}

static void test_prompt_in_one_call_or_in_steps_gives_the_same_bits(kilat_model *m) {
  kilat_session *a = session_of(m, 64, KILAT_KEEP_LAYERS), *b = session_of(m, 100, KILAT_KEEP_LAYERS);
  float la[TINY_VOCAB], lb[TINY_VOCAB], ka[(TINY_LAYERS + 1) * TINY_HIDDEN], kb[(TINY_LAYERS + 1) * TINY_HIDDEN];
  int32_t ids[40];
  for (int i = 0; i < 40; i++) ids[i] = (i * 37 + 5) % TINY_VOCAB;
  CHECK(kilat_prefill(a, ids, 40, NULL, NULL) == KILAT_OK);
  CHECK(kilat_prefill(b, ids, 11, NULL, NULL) == KILAT_OK);
  for (int i = 11; i < 40; i++) CHECK(kilat_step(b, ids[i], NULL, NULL) == KILAT_OK);
  CHECK(kilat_logits(a, la) == KILAT_OK && kilat_logits(b, lb) == KILAT_OK && !memcmp(la, lb, sizeof la));
  CHECK(kilat_layers(a, ka) == KILAT_OK && kilat_layers(b, kb) == KILAT_OK && !memcmp(ka, kb, sizeof ka));
  CHECK(kilat_tokens(a) == 40 && kilat_context(b) == 100);
  for (int i = 0; i < TINY_VOCAB; i++) CHECK(isfinite(la[i]));
  kilat_session_close(a);
  kilat_session_close(b);
}

static void test_rewind_and_again_gives_the_same_ids(kilat_model *m) {
  kilat_session *s = session_of(m, 64, 0);
  const kilat_sampling sampling = {0.9, 0.95, 0.01, 50, 7};
  int32_t prompt[3] = {1, 2, 3}, first[20], id;
  for (int round = 0; round < 2; round++) {
    CHECK(kilat_prefill(s, prompt, 3, &sampling, &id) == KILAT_OK);
    for (int i = 0; i < 20; i++) {
      if (round) CHECK(first[i] == id);
      first[i] = id;
      CHECK(kilat_step(s, id, &sampling, &id) == KILAT_OK);
    }
    CHECK(kilat_rewind(s, round ? 5 : 0) == KILAT_OK);
  }
  CHECK(kilat_tokens(s) == 5 && kilat_sample(s, &sampling, &id) == KILAT_NO_LOGITS);
  kilat_session_close(s);
}

static void test_snapshot_goes_on_where_it_was(kilat_model *m) {
  kilat_session *a = session_of(m, 64, 0), *b = session_of(m, 30, 0);
  int32_t prompt[9] = {9, 8, 7, 6, 5, 4, 3, 2, 1}, ia, ib;
  int64_t size = 0, written = 0;
  CHECK(kilat_prefill(a, prompt, 9, &greedy, &ia) == KILAT_OK);
  CHECK(kilat_snapshot(a, NULL, 0, &size) == KILAT_TOO_SMALL && size == kilat_snapshot_bytes(a));
  char *data = malloc((size_t)size);
  CHECK(data && kilat_snapshot(a, data, size, &written) == KILAT_OK && written == size);
  CHECK(kilat_restore(b, data, size) == KILAT_OK && kilat_tokens(b) == 9);
  CHECK(kilat_sample(b, &greedy, &ib) == KILAT_OK && ia == ib);
  for (int i = 0; i < 12; i++) {
    CHECK(kilat_step(a, ia, &greedy, &ia) == KILAT_OK && kilat_step(b, ib, &greedy, &ib) == KILAT_OK);
    CHECK(ia == ib);
  }
  for (int64_t at = 0; at < size; at += size / 97 + 1) {
    data[at] ^= 1;
    CHECK(kilat_restore(b, data, size) == KILAT_BAD_SNAPSHOT && kilat_tokens(b) == 0);
    data[at] ^= 1;
    CHECK(kilat_restore(b, data, at) == KILAT_BAD_SNAPSHOT);
  }
  kilat_session *small = session_of(m, 8, 0);
  CHECK(kilat_restore(small, data, size) == KILAT_CONTEXT_FULL);
  free(data);
  kilat_session_close(a);
  kilat_session_close(b);
  kilat_session_close(small);
}

static void test_wrong_arguments_are_told_and_change_nothing(kilat_model *m) {
  kilat_session *s = session_of(m, 10, 0), *none;
  int32_t ids[11] = {0}, id = -5;
  float out[TINY_VOCAB];
  kilat_sampling hot = {-1, 1, 0, 0, 0}, flat = {1, 0, 0, 0, 0}, odd = {NAN, 1, 0, 0, 0};
  CHECK(kilat_logits(s, out) == KILAT_NO_LOGITS && kilat_layers(s, out) == KILAT_BAD_ARGUMENT);
  CHECK(kilat_prefill(s, ids, 11, NULL, NULL) == KILAT_CONTEXT_FULL && strstr(kilat_session_error(s), "10"));
  CHECK(kilat_prefill(s, ids, 0, NULL, NULL) == KILAT_BAD_ARGUMENT && kilat_prefill(s, NULL, 1, NULL, NULL) == KILAT_BAD_ARGUMENT);
  CHECK(kilat_step(s, TINY_VOCAB, NULL, NULL) == KILAT_BAD_ARGUMENT && kilat_step(s, -1, NULL, NULL) == KILAT_BAD_ARGUMENT);
  CHECK(kilat_step(s, 1, &greedy, NULL) == KILAT_BAD_ARGUMENT && kilat_step(s, 1, &hot, &id) == KILAT_BAD_ARGUMENT);
  CHECK(kilat_step(s, 1, &flat, &id) == KILAT_BAD_ARGUMENT && kilat_step(s, 1, &odd, &id) == KILAT_BAD_ARGUMENT);
  CHECK(kilat_tokens(s) == 0 && id == -5 && kilat_rewind(s, 1) == KILAT_BAD_ARGUMENT);
  CHECK(kilat_prefill(s, ids, 10, &greedy, &id) == KILAT_OK && id >= 0 && kilat_step(s, id, NULL, NULL) == KILAT_CONTEXT_FULL);
  CHECK(kilat_step(NULL, 1, NULL, NULL) == KILAT_BAD_ARGUMENT && kilat_tokens(NULL) == 0);
  kilat_session_close(s);
  kilat_session_options large = {TINY_CONTEXT + 1, 0};
  CHECK(kilat_session_create(m, &large, &none) == KILAT_BAD_ARGUMENT && none && strstr(kilat_session_error(none), "256"));
  CHECK(kilat_step(none, 1, NULL, NULL) == KILAT_BAD_ARGUMENT);
  kilat_session_close(none);
  kilat_session_close(NULL);
  kilat_close(NULL);
}

static void test_text_becomes_ids_and_back(kilat_model *m) {
  const char text[] = "hello <|270|> \xc3\xa9", *bytes;
  int32_t ids[64];
  int64_t n = 0, length = 0, at = 0;
  char back[64];
  CHECK(kilat_encode(m, text, (int64_t)strlen(text), 1, ids, 64, &n) == KILAT_OK);
  CHECK(ids[0] == 257 && n < (int64_t)strlen(text));
  int special = 0;
  for (int64_t i = 0; i < n; i++) {
    CHECK(kilat_token_bytes(m, ids[i], &bytes, &length) == KILAT_OK);
    memcpy(back + at, bytes, (size_t)length);
    at += length;
    special += ids[i] == 270;
  }
  CHECK(special == 1 && at == (int64_t)strlen(text) && !memcmp(back, text, (size_t)at));
  CHECK(kilat_encode(m, text, (int64_t)strlen(text), 0, ids, 64, &n) == KILAT_OK && n > 10);
  CHECK(kilat_encode(m, text, (int64_t)strlen(text), 0, ids, 3, &n) == KILAT_TOO_SMALL && n > 3);
  CHECK(kilat_encode(m, "\xff", 1, 0, ids, 64, &n) == KILAT_BAD_ARGUMENT);
  CHECK(kilat_token_bytes(m, TINY_VOCAB, &bytes, &length) == KILAT_BAD_ARGUMENT);
}

static void test_memory_report_names_every_owner(kilat_model *m) {
  kilat_session *s = session_of(m, 64, 0);
  kilat_memory owners[32];
  int n = 0, few = 0;
  int64_t kv = 0;
  CHECK(kilat_memory_report(m, s, owners, 32, &n) == KILAT_OK && n > 5);
  for (int i = 0; i < n; i++)
    if (!strcmp(owners[i].owner, "kv")) kv = owners[i].host_bytes;
  CHECK(kv >= TINY_LAYERS * 2 * 64 * (TINY_HIDDEN / 2) * 2);
  CHECK(kilat_memory_report(m, s, owners, 2, &few) == KILAT_TOO_SMALL && few == n);
  kilat_session_close(s);
}

static void *run_stream(void *raw) {
  kilat_session *s = raw;
  int32_t id, prompt[5] = {10, 20, 30, 40, 50};
  CHECK(kilat_prefill(s, prompt, 5, &greedy, &id) == KILAT_OK);
  for (int i = 0; i < 40; i++) CHECK(kilat_step(s, id, &greedy, &id) == KILAT_OK);
  return NULL;
}

static void test_sessions_of_one_model_run_in_several_threads(kilat_model *m) {
  kilat_session *s[3];
  pthread_t threads[3];
  float logits[3][TINY_VOCAB];
  for (int i = 0; i < 3; i++) s[i] = session_of(m, 64, 0);
  for (int i = 0; i < 3; i++) CHECK(pthread_create(&threads[i], NULL, run_stream, s[i]) == 0);
  for (int i = 0; i < 3; i++) CHECK(pthread_join(threads[i], NULL) == 0);
  for (int i = 0; i < 3; i++) CHECK(kilat_logits(s[i], logits[i]) == KILAT_OK && !memcmp(logits[i], logits[0], sizeof logits[0]));
  for (int i = 0; i < 3; i++) kilat_session_close(s[i]);
}

/* A damaged file gives a status and a text, and closing what is left over is fine. */
static void expect_refusal(const void *data, size_t n) {
  char path[96];
  kilat_model *m;
  snprintf(path, sizeof path, "%s/damaged.gguf", folder);
  write_file(path, data, n);
  int status = kilat_open(path, NULL, &m);
  CHECK(status == KILAT_OK || (m && kilat_model_error(m)[0]));
  CHECK(n == 0 || status == KILAT_OK || status == KILAT_BAD_FILE || status == KILAT_UNSUPPORTED);
  kilat_close(m);
}

static void test_damaged_files_are_refused(const tiny_file *whole) {
  kilat_model *m;
  unsigned char *copy = malloc(whole->size);
  CHECK(copy);
  for (size_t n = 0; n < whole->size; n += whole->size / 61 + 1) {
    char path[96];
    snprintf(path, sizeof path, "%s/cut.gguf", folder);
    write_file(path, whole->data, n);
    CHECK(kilat_open(path, NULL, &m) == KILAT_BAD_FILE && kilat_model_error(m)[0]);
    kilat_session *s;
    CHECK(kilat_session_create(m, NULL, &s) == KILAT_BAD_ARGUMENT);
    kilat_session_close(s);
    kilat_close(m);
  }
  for (size_t at = 0; at < 1200; at += 7) {
    memcpy(copy, whole->data, whole->size);
    copy[at] = (unsigned char)(at % 3 ? 0xff : copy[at] ^ 0x10);
    expect_refusal(copy, whole->size);
  }
  free(copy);
  CHECK(kilat_open("/nonexistent/model.gguf", NULL, &m) == KILAT_BAD_FILE && strstr(kilat_model_error(m), "model.gguf"));
  kilat_close(m);
  CHECK(kilat_open(folder, NULL, &m) == KILAT_BAD_FILE);
  kilat_close(m);
  kilat_options odd = {0};
  odd.device = 7;
  CHECK(kilat_open(model_path, &odd, &m) == KILAT_BAD_ARGUMENT);
  kilat_close(m);
}

int main(void) {
  snprintf(folder, sizeof folder, "%s/kilat-test-XXXXXX", P_tmpdir);
  CHECK(mkdtemp(folder));
  snprintf(model_path, sizeof model_path, "%s/tiny.gguf", folder);
  tiny_file file = tiny_gguf();
  write_file(model_path, file.data, file.size);
  for (int32_t weights = KILAT_WEIGHTS_STORED; weights <= KILAT_WEIGHTS_WIDE; weights++)
    for (int32_t threads = 1; threads <= 3; threads += 2) {
      kilat_options options = {KILAT_DEVICE_CPU, 0, threads, threads == 1 ? KILAT_DTYPE_F32 : KILAT_DTYPE_AUTO, weights};
      kilat_model *m = open_tiny(&options);
      test_facts_are_those_of_the_file(m);
      test_prompt_in_one_call_or_in_steps_gives_the_same_bits(m);
      test_rewind_and_again_gives_the_same_ids(m);
      test_snapshot_goes_on_where_it_was(m);
      test_wrong_arguments_are_told_and_change_nothing(m);
      test_text_becomes_ids_and_back(m);
      test_memory_report_names_every_owner(m);
      test_sessions_of_one_model_run_in_several_threads(m);
      kilat_close(m);
    }
  test_damaged_files_are_refused(&file);
  free(file.data);
  char command[128];
  snprintf(command, sizeof command, "rm -rf %s", folder);
  CHECK(system(command) == 0);
  printf("runtime: %d checks\n", checks);
  return 0;
}
