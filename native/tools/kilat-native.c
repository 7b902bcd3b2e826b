/* kilat-native: one prompt, one stream, on the terminal. Needs no Python; `kilat-native --help` tells the options. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../include/kilat.h"

static const char kHelp[] =
    "usage: kilat-native MODEL -p PROMPT [options]\n"
    "  MODEL              a .gguf file, or a directory with config.json and safetensors (then with --ids)\n"
    "  -p, --prompt TEXT  the text to go on with; control tokens in it are recognised\n"
    "  --ids N,N,...      token ids instead of a text\n"
    "  -n, --max N        most tokens to write (default 128)\n"
    "  --temperature T    0 is greedy (default 0)\n"
    "  --top-k K, --top-p P, --min-p P, --seed S\n"
    "  -c, --context N    tokens that the session can hold (default: the model's, at most 4096)\n"
    "  -t, --threads N    default: one per processor\n"
    "  --device cpu|cuda  default cpu\n"
    "  --weights W        stored, wide or auto (default)\n"
    "  --dtype D          auto (default), f32 or bf16\n"
    "  --ignore-end       go on after an id that ends a text\n"
    "  --print-ids        ids instead of text\n"
    "  --stats            times and memory, on stderr\n";

typedef struct arguments {
  const char *model, *prompt, *ids;
  int64_t max;
  int ignore_end, print_ids, stats;
  kilat_options options;
  kilat_session_options session;
  kilat_sampling sampling;
} arguments;

static double now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static int wrong(const char *what, const char *got) {
  fprintf(stderr, "kilat-native: %s: %s (see --help)\n", what, got);
  return 2;
}

static int to_int(const char *text, int64_t low, int64_t high, int64_t *out) {
  char *end;
  errno = 0;
  long long value = strtoll(text, &end, 10);
  if (errno || *end || end == text || value < low || value > high) return wrong("not a whole number in range", text);
  *out = value;
  return 0;
}

static int to_real(const char *text, double *out) {
  char *end;
  *out = strtod(text, &end);
  return *end || end == text || !isfinite(*out) ? wrong("not a number", text) : 0;
}

static int to_choice(const char *text, const char *const *names, int32_t *out) {
  for (int32_t i = 0; names[i]; i++)
    if (!strcmp(text, names[i])) {
      *out = i;
      return 0;
    }
  return wrong("not one of the choices", text);
}

/* One flag with a value. */
static int set_flag(arguments *a, const char *flag, const char *value) {
  static const char *const devices[] = {"cpu", "cuda", NULL}, *const weights[] = {"auto", "stored", "wide", NULL},
                           *const dtypes[] = {"auto", "f32", "bf16", NULL};
  int64_t n = 0;
  int bad = 0;
  if (!strcmp(flag, "-p") || !strcmp(flag, "--prompt")) a->prompt = value;
  else if (!strcmp(flag, "--ids")) a->ids = value;
  else if (!strcmp(flag, "-n") || !strcmp(flag, "--max")) bad = to_int(value, 1, 1 << 24, &a->max);
  else if (!strcmp(flag, "--temperature")) bad = to_real(value, &a->sampling.temperature);
  else if (!strcmp(flag, "--top-p")) bad = to_real(value, &a->sampling.top_p);
  else if (!strcmp(flag, "--min-p")) bad = to_real(value, &a->sampling.min_p);
  else if (!strcmp(flag, "--top-k")) bad = to_int(value, 0, 1 << 24, &a->sampling.top_k);
  else if (!strcmp(flag, "--seed")) bad = to_int(value, 0, INT64_MAX, &n), a->sampling.seed = (uint64_t)n;
  else if (!strcmp(flag, "-c") || !strcmp(flag, "--context")) bad = to_int(value, 1, 1 << 24, &a->session.context);
  else if (!strcmp(flag, "-t") || !strcmp(flag, "--threads")) bad = to_int(value, 1, 1024, &n), a->options.threads = (int32_t)n;
  else if (!strcmp(flag, "--device")) bad = to_choice(value, devices, &a->options.device);
  else if (!strcmp(flag, "--weights")) bad = to_choice(value, weights, &a->options.weights);
  else if (!strcmp(flag, "--dtype")) bad = to_choice(value, dtypes, &a->options.dtype);
  else return wrong("unknown option", flag);
  return bad;
}

static int parse(int argc, char **argv, arguments *a) {
  for (int i = 1; i < argc; i++) {
    const char *flag = argv[i];
    if (!strcmp(flag, "--ignore-end")) a->ignore_end = 1;
    else if (!strcmp(flag, "--print-ids")) a->print_ids = 1;
    else if (!strcmp(flag, "--stats")) a->stats = 1;
    else if (flag[0] != '-' && !a->model) a->model = flag;
    else if (i + 1 == argc) return wrong("needs a value, or is not known", flag);
    else if (set_flag(a, flag, argv[++i])) return 2;
  }
  if (!a->model || !a->prompt == !a->ids) return wrong("a model and either a prompt or ids are needed", "got something else");
  return 0;
}

/* The prompt's ids, to be freed; NULL after a message. */
static int32_t *prompt_ids(kilat_model *m, const arguments *a, int64_t *n) {
  size_t room = 3 * strlen(a->ids ? a->ids : a->prompt) + 4; /* an id a byte, and normalization can make three bytes of one */
  int32_t *ids = malloc(room * sizeof *ids);
  if (!ids) return NULL;
  *n = 0;
  if (!a->ids) {
    if (!kilat_encode(m, a->prompt, (int64_t)strlen(a->prompt), 1, ids, (int64_t)room, n)) return ids;
    fprintf(stderr, "kilat-native: %s\n", kilat_model_error(m));
    free(ids);
    return NULL;
  }
  for (const char *at = a->ids; *at;) {
    char *end;
    long value = strtol(at, &end, 10);
    if (end == at || value < 0 || value > INT32_MAX || (*end && *end != ',')) {
      wrong("not a list of ids", a->ids);
      free(ids);
      return NULL;
    }
    ids[(*n)++] = (int32_t)value;
    at = *end ? end + 1 : end;
  }
  return ids;
}

static void write_token(kilat_model *m, const arguments *a, int32_t id) {
  const char *bytes;
  int64_t n;
  if (a->print_ids || kilat_token_bytes(m, id, &bytes, &n)) printf("%" PRId32 " ", id);
  else fwrite(bytes, 1, (size_t)n, stdout);
  fflush(stdout);
}

static int ends(const kilat_info *info, int32_t id) {
  for (int32_t i = 0; i < info->n_end_ids; i++)
    if (info->end_ids[i] == id) return 1;
  return 0;
}

static void report(kilat_model *m, kilat_session *s, const double *at, int64_t n_prompt, int64_t n_out) {
  kilat_memory owners[32];
  int n = 0;
  int64_t total = 0;
  double decode_s = (at[4] - at[3]) * 1e-3;
  fprintf(stderr, "load %.1f ms, session %.1f ms, first token of %" PRId64 " after %.1f ms (%.1f ms from the start)\n",
          at[1] - at[0], at[2] - at[1], n_prompt, at[3] - at[2], at[3] - at[0]);
  if (n_out > 1) fprintf(stderr, "decode %.2f tok/s over %" PRId64 " tokens\n", (double)(n_out - 1) / decode_s, n_out - 1);
  if (kilat_memory_report(m, s, owners, 32, &n)) return;
  for (int i = 0; i < n; i++) {
    total += owners[i].host_bytes + owners[i].device_bytes;
    fprintf(stderr, "%-12s %12" PRId64 " bytes host %12" PRId64 " bytes device\n", owners[i].owner, owners[i].host_bytes,
            owners[i].device_bytes);
  }
  fprintf(stderr, "%-12s %12" PRId64 " bytes\n", "all", total);
}

static int generate(kilat_model *m, kilat_session *s, const arguments *a, double *at) {
  kilat_info info;
  int64_t n_prompt, n_out = 0;
  int32_t id = 0, *ids = prompt_ids(m, a, &n_prompt);
  if (!ids) return 2;
  kilat_model_info(m, &info);
  at[2] = now_ms();
  int status = kilat_prefill(s, ids, n_prompt, &a->sampling, &id);
  at[3] = now_ms();
  free(ids);
  while (!status) {
    n_out++;
    if (ends(&info, id) && !a->ignore_end) break;
    write_token(m, a, id);
    if (n_out == a->max || kilat_tokens(s) == kilat_context(s)) break;
    status = kilat_step(s, id, &a->sampling, &id);
  }
  at[4] = now_ms();
  putchar('\n');
  if (status) {
    fprintf(stderr, "kilat-native: %s: %s\n", kilat_status_name(status), kilat_session_error(s));
    return 1;
  }
  if (a->stats) report(m, s, at, n_prompt, n_out);
  return 0;
}

int main(int argc, char **argv) {
  arguments a = {0};
  double at[5] = {now_ms(), 0, 0, 0, 0};
  kilat_model *m = NULL;
  kilat_session *s = NULL;
  int failed, status;
  a.max = 128;
  a.session.flags = KILAT_RUN_AHEAD;
  a.sampling.top_p = 1;
  if (argc == 2 && !strcmp(argv[1], "--help")) return fputs(kHelp, stdout) < 0;
  if (parse(argc, argv, &a)) return 2;
  status = kilat_open(a.model, &a.options, &m);
  at[1] = now_ms();
  if (status) {
    fprintf(stderr, "kilat-native: %s: %s\n", kilat_status_name(status), kilat_model_error(m));
    kilat_close(m);
    return 1;
  }
  status = kilat_session_create(m, &a.session, &s);
  if (status) fprintf(stderr, "kilat-native: %s: %s\n", kilat_status_name(status), kilat_session_error(s));
  failed = status ? 1 : generate(m, s, &a, at);
  kilat_session_close(s);
  kilat_close(m);
  return failed;
}
