// Snapshots: a header, the token ids, the backend's state, and a checksum over all of it.
#include <string.h>

#include "error.h"
#include "handles.h"

using namespace kilat;

namespace {

const char kMagic[8] = {'K', 'I', 'L', 'A', 'T', 'S', 'N', '1'};

struct Header {
  char magic[8];
  uint64_t identity;
  int64_t n_tokens, state_bytes;
  int64_t has_logits;
};

int64_t padded_ids(int64_t n) { return (n * int64_t(sizeof(int32_t)) + 7) & ~int64_t(7); }

// Eight bytes at a time; n is a multiple of 8 but for the end.
uint64_t checksum_of(const char *p, int64_t n) {
  uint64_t hash = 0x9E3779B97F4A7C15u ^ uint64_t(n);
  for (; n >= 8; p += 8, n -= 8) {
    uint64_t word;
    memcpy(&word, p, 8);
    hash = (hash ^ word) * 0xff51afd7ed558ccdu;
    hash ^= hash >> 32;
  }
  for (; n > 0; p++, n--) hash = (hash ^ static_cast<unsigned char>(*p)) * 0x100000001b3u;
  return hash;
}

int64_t size_of(const kilat_session *s) {
  return int64_t(sizeof(Header)) + padded_ids(s->n_tokens()) + s->model->backend->state_bytes(s->device, s->n_tokens()) + 8;
}

void write(kilat_session *s, char *out, int64_t size) {
  int64_t n = s->n_tokens(), state = s->model->backend->state_bytes(s->device, n);
  Header header = {{}, s->model->identity, n, state, s->has_logits};
  memcpy(header.magic, kMagic, 8);
  memcpy(out, &header, sizeof header);
  char *at = out + sizeof header;
  memset(at, 0, size_t(padded_ids(n)));
  memcpy(at, s->ids.data(), size_t(n) * sizeof(int32_t));
  at += padded_ids(n);
  kilat_failure failure = {};
  if (int status = s->model->backend->state_read(s->device, n, at, &failure)) fail(status, "%s", failure.text);
  uint64_t sum = checksum_of(out, size - 8);
  memcpy(out + size - 8, &sum, 8);
}

void read(kilat_session *s, const char *data, int64_t size) {
  s->ids.clear();
  s->has_logits = false;
  Header h;
  if (size < int64_t(sizeof h) + 8)
    fail(KILAT_BAD_SNAPSHOT, "the snapshot has %lld bytes, too few for one", static_cast<long long>(size));
  memcpy(&h, data, sizeof h);
  uint64_t sum;
  memcpy(&sum, data + size - 8, 8);
  if (memcmp(h.magic, kMagic, 8) != 0 || sum != checksum_of(data, size - 8))
    fail(KILAT_BAD_SNAPSHOT, "the snapshot is damaged, or none of this version");
  if (h.identity != s->model->identity)
    fail(KILAT_BAD_SNAPSHOT, "the snapshot is of another model, dtype or kernel set: its numbers would not be those of this one");
  if (h.n_tokens < 0 || h.n_tokens > s->context)
    fail(KILAT_CONTEXT_FULL, "the snapshot has %lld tokens, the session's context is %lld", static_cast<long long>(h.n_tokens),
         static_cast<long long>(s->context));
  int64_t ids = padded_ids(h.n_tokens), state = s->model->backend->state_bytes(s->device, h.n_tokens);
  if (h.state_bytes != state || size != int64_t(sizeof h) + ids + state + 8)
    fail(KILAT_BAD_SNAPSHOT, "the snapshot's size does not fit its tokens");
  kilat_failure failure = {};
  if (int status = s->model->backend->state_write(s->device, h.n_tokens, data + sizeof h + ids, &failure))
    fail(status, "%s", failure.text);
  s->ids.resize(size_t(h.n_tokens));
  memcpy(s->ids.data(), data + sizeof h, size_t(h.n_tokens) * sizeof(int32_t));
  s->has_logits = h.has_logits != 0;
}

}  // namespace

extern "C" {

int64_t kilat_snapshot_bytes(const kilat_session *s) { return s && s->device ? size_of(s) : 0; }

int kilat_snapshot(kilat_session *s, void *out, int64_t capacity, int64_t *written) {
  return guard(s, [&] {
    if (!written) fail(KILAT_BAD_ARGUMENT, "written is null");
    *written = size_of(s);
    if (!out || capacity < *written)
      fail(KILAT_TOO_SMALL, "the snapshot has %lld bytes, there is room for %lld", static_cast<long long>(*written),
           static_cast<long long>(capacity));
    write(s, static_cast<char *>(out), *written);
  });
}

int kilat_restore(kilat_session *s, const void *data, int64_t n_bytes) {
  return guard(s, [&] {
    if (!data) fail(KILAT_BAD_ARGUMENT, "data is null");
    read(s, static_cast<const char *>(data), n_bytes);
  });
}

}  // extern "C"
