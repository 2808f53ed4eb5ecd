// One layer's routed experts for the (token, expert) pairs that a GPU does not hold: gate, up, SiLU, down and the weighted sum, on a crew of threads.
//
// `lab_cold_run` has the shape of a host node of a CUDA or HIP graph, void(void*): it calls neither Python nor the driver, and says what went wrong in
// its totals. Tokens are grouped by expert, so that an expert's weights are read and decoded once for up to kTokens of them. The sum over a token's
// experts goes by expert number, whatever the batch: a result depends neither on the threads nor on the other tokens.
#include <algorithm>
#include <cmath>

#include "crew.h"
#include "planes.h"

extern "C" void lab_cold_run(void* what);

namespace lab {
namespace {

enum { kCalls, kTokensSeen, kPairs, kExperts, kNs, kRefused, kTotals };  // of `totals`, as _TOTALS in cold.py

struct Slot {
  int32_t expert, token;
  float weight;
};

struct Group {  // pairs [first, end) of one expert
  int64_t expert, first, end;
};

}  // namespace

struct Scratch {
  std::vector<Slot> pairs;
  std::vector<Group> groups;
  std::vector<float> x, h;
};

struct Job;

struct Office {  // what the layers of one engine share: one job runs at a time
  explicit Office(int threads) : crew(threads) {}
  ~Office() { leave(); }
  void leave() {
    ended = true;
    if (attendant.joinable()) attendant.join();
  }
  Crew crew;
  Scratch scratch;
  std::vector<const Job*> jobs;  // by number, for the attendant; room is taken once, so that it may read while one is added
  std::atomic<bool> ended{false};
  std::thread attendant;
};

constexpr size_t kMostJobs = 1 << 14;

// Mirrors `_Job` in cold.py. x [tokens, hidden] of x_kind, ids and weights [tokens, topk] (id below 0: computed elsewhere), y float32 [tokens, hidden],
// which is written whole. totals int64 [kTotals] are added to.
struct Job {
  Office* office;
  const Stack *gate_up, *down;
  const void* x;
  const int32_t* ids;
  const float* weights;
  float* y;
  int64_t* totals;
  int64_t tokens, topk;
  int32_t x_kind;  // 0 float32, 1 float16, 2 bfloat16
};

namespace {

void to_floats(const uint8_t* from, int kind, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) store(to + i, kind == 1 ? halves(from + 2 * i) : brains(from + 2 * i));
  for (; i < count; ++i) to[i] = kind == 1 ? half(from + 2 * i) : brain(from + 2 * i);
}

// Pairs by expert, then token; returns the first token's number whose expert is not there, or -1. Such tokens become NaN.
int64_t group_slots(const Job& job, Scratch& s) {
  s.pairs.clear(), s.groups.clear();
  int64_t refused = -1;
  for (int64_t i = 0; i < job.tokens * job.topk; ++i) {
    if (job.ids[i] < 0) continue;
    if (job.ids[i] < job.gate_up->count)
      s.pairs.push_back({job.ids[i], (int32_t)(i / job.topk), job.weights[i]});
    else if (refused < 0)
      refused = i / job.topk;
  }
  std::stable_sort(s.pairs.begin(), s.pairs.end(), [](const Slot& a, const Slot& b) { return a.expert < b.expert; });
  for (int64_t i = 0; i < (int64_t)s.pairs.size(); ++i) {
    if (s.groups.empty() || s.groups.back().expert != s.pairs[i].expert) s.groups.push_back({s.pairs[i].expert, i, i});
    s.groups.back().end = i + 1;
  }
  return refused;
}

// Blocks [begin, end) of a group's gate and up. The next block's bytes are asked for while one is multiplied.
void gate_up_blocks(const Job& job, Scratch& s, const float* x, const Group& group, int64_t begin, int64_t end) {
  const Stack& stack = *job.gate_up;
  const float unit = stack.unit ? stack.unit[group.expert] : 1.0f;
  const int64_t gates = group.expert * 2 * blocks_of(stack), ups = gates + blocks_of(stack);
  Floats gate[kTokens], up[kTokens];
  const float* rows[kTokens];
  for (int64_t block = begin; block < end; ++block) {
    const int64_t next = block + 1 < end ? block + 1 : block;
    for (int64_t first = group.first; first < group.end; first += kTokens) {
      const int tokens = (int)std::min<int64_t>(kTokens, group.end - first);
      for (int t = 0; t < tokens; ++t) rows[t] = x + s.pairs[first + t].token * stack.cols;
      some_block(tokens, stack, group.expert, 0, block, gates + next, rows, gate);
      some_block(tokens, stack, group.expert, 1, block, ups + next, rows, up);
      for (int t = 0; t < tokens; ++t) {
        float g[16], u[16];
        store(g, gate[t]), store(u, up[t]);
        float* const h = s.h.data() + (first + t) * stack.rows + block * 16;
        for (int64_t r = 0; r < std::min<int64_t>(16, stack.rows - block * 16); ++r) h[r] = g[r] * unit / (1.0f + std::exp(-g[r] * unit)) * (u[r] * unit);
      }
    }
  }
}

// Blocks [begin, end) of y, over all experts: their sums meet in one thread.
void down_blocks(const Job& job, Scratch& s, int64_t begin, int64_t end) {
  const Stack& stack = *job.down;
  const int64_t from = begin * 16, count = std::min(stack.rows, end * 16) - from;
  for (int64_t t = 0; t < job.tokens; ++t) std::fill_n(job.y + t * stack.rows + from, count, 0.0f);
  Floats found[kTokens];
  const float* rows[kTokens];
  for (size_t g = 0; g < s.groups.size(); ++g) {
    const Group& group = s.groups[g];
    const float unit = stack.unit ? stack.unit[group.expert] : 1.0f;
    const int64_t blocks = blocks_of(stack), following = g + 1 < s.groups.size() ? s.groups[g + 1].expert * blocks + begin : group.expert * blocks + end - 1;
    for (int64_t block = begin; block < end; ++block) {
      const int64_t next = block + 1 < end ? group.expert * blocks + block + 1 : following;
      for (int64_t first = group.first; first < group.end; first += kTokens) {
        const int tokens = (int)std::min<int64_t>(kTokens, group.end - first);
        for (int t = 0; t < tokens; ++t) rows[t] = s.h.data() + (first + t) * stack.cols;
        some_block(tokens, stack, group.expert, 0, block, next, rows, found);
        for (int t = 0; t < tokens; ++t) {
          const Slot& pair = s.pairs[first + t];
          float sum[16];
          store(sum, found[t]);
          float* const y = job.y + pair.token * stack.rows + block * 16;
          for (int64_t r = 0; r < std::min<int64_t>(16, stack.rows - block * 16); ++r) y[r] += pair.weight * unit * sum[r];
        }
      }
    }
  }
}

// How many consecutive blocks are one unit, so that `groups` times `blocks` make some units per thread, and a unit is a run of memory that can be fetched ahead.
int64_t unit_blocks(int64_t groups, int64_t blocks, int threads) { return std::min(blocks, std::max<int64_t>(2, groups * blocks / (threads * 6))); }

void run(const Job& job) {
  Crew& crew = job.office->crew;
  Scratch& s = job.office->scratch;
  const int64_t refused = group_slots(job, s), hidden = job.gate_up->cols, out = job.down->rows;
  if (s.pairs.empty()) {
    std::fill_n(job.y, job.tokens * out, 0.0f);
  } else {
    const float* x = (const float*)job.x;
    if (job.x_kind) {
      s.x.resize(job.tokens * hidden);
      const auto convert = [&](int64_t t) { to_floats((const uint8_t*)job.x + 2 * t * hidden, job.x_kind, hidden, s.x.data() + t * hidden); };
      if (job.tokens > 8)
        crew.share(job.tokens, convert);
      else
        for (int64_t t = 0; t < job.tokens; ++t) convert(t);
      x = s.x.data();
    }
    s.h.resize(s.pairs.size() * job.gate_up->rows);
    const int64_t blocks = blocks_of(*job.gate_up), step = unit_blocks(s.groups.size(), blocks, crew.threads()), per = (blocks + step - 1) / step;
    crew.share(s.groups.size() * per, [&](int64_t unit) {
      const int64_t begin = unit % per * step;
      gate_up_blocks(job, s, x, s.groups[unit / per], begin, std::min(blocks, begin + step));
    });
    const int64_t outs = blocks_of(*job.down), run = unit_blocks(1, outs, crew.threads());
    crew.share((outs + run - 1) / run, [&](int64_t unit) { down_blocks(job, s, unit * run, std::min(outs, (unit + 1) * run)); });
  }
  for (int64_t i = 0; refused >= 0 && i < job.tokens * job.topk; ++i)
    if (job.ids[i] >= job.gate_up->count) {
      ++job.totals[kRefused];
      std::fill_n(job.y + i / job.topk * out, out, std::nanf(""));
    }
}

}  // namespace
}  // namespace lab

using namespace lab;

extern "C" {

void* lab_office(int threads) { return new Office(std::max(1, threads)); }

void lab_office_close(void* office) { delete (Office*)office; }

// Ends the attendant alone.
void lab_office_leave(void* office) { ((Office*)office)->leave(); }

void lab_cold_run(void* what) {
  const Job& job = *(const Job*)what;
  const int64_t started = now_ns();
  run(job);
  const Scratch& s = job.office->scratch;
  job.totals[kCalls] += 1;
  job.totals[kTokensSeen] += job.tokens;
  job.totals[kPairs] += (int64_t)s.pairs.size();
  job.totals[kExperts] += (int64_t)s.groups.size();
  job.totals[kNs] += now_ns() - started;
}

// The number by which the bell calls this job, or -1.
int64_t lab_office_enroll(void* office, const void* job) {
  std::vector<const Job*>& jobs = ((Office*)office)->jobs;
  if (jobs.capacity() < kMostJobs) jobs.reserve(kMostJobs);
  if (jobs.size() == kMostJobs) return -1;
  jobs.push_back((const Job*)job);
  return (int64_t)jobs.size() - 1;
}

// Starts a thread that answers a bell in memory which a GPU writes: a value other than the last one has a job's number in its upper half. The job is run
// and the value written to `answer`. While calls come often it looks without a pause; after a millisecond without any, every 20 microseconds.
void lab_office_attend(void* what, int64_t* bell, int64_t* answer) {
  Office* const office = (Office*)what;
  office->attendant = std::thread([office, bell, answer] {
    int64_t last = __atomic_load_n(bell, __ATOMIC_ACQUIRE), since = now_ns();
    while (!office->ended) {
      const int64_t value = __atomic_load_n(bell, __ATOMIC_ACQUIRE);
      if (value != last) {
        last = value;
        if ((size_t)(value >> 32) < office->jobs.size()) lab_cold_run((void*)office->jobs[value >> 32]);
        __atomic_store_n(answer, value, __ATOMIC_RELEASE);
        since = now_ns();
      } else if (now_ns() - since < 1000000) {
        pause();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
    }
  });
}

// Nanoseconds that the crew needs to read `bytes` once: what the host's memory gives, for a job's rate to be set against.
int64_t lab_office_read(void* office, const uint8_t* from, int64_t bytes) {
  constexpr int64_t piece = 1 << 20;
  std::atomic<uint32_t> all{0};
  const int64_t started = now_ns();
  ((Office*)office)->crew.share((bytes + piece - 1) / piece, [&](int64_t unit) {
    Words sum[4] = {};
    const uint8_t* const end = from + std::min(bytes, (unit + 1) * piece);
    for (const uint8_t* at = from + unit * piece; at + 256 <= end; at += 256)
      for (int i = 0; i < 4; ++i) {
        const Words next = load_words(at + 64 * i);
        for (int n = 0; n < kLanes; ++n) sum[i].lane[n] ^= next.lane[n];
      }
    uint32_t found = 0;
    for (int i = 0; i < 4; ++i)
      for (int n = 0; n < kLanes; ++n)
        for (int k = 0; k < kWide; ++k) found ^= sum[i].lane[n][k];
    all ^= found;
  });
  return now_ns() - started + (all.load() == 0x5eed5eedu ? 1 : 0);  // the sum is used, so that it is made
}

}  // extern "C"
