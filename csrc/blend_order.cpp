// Which dataset gives sample i of a blend; see blend_order.h.
//
// Built with -ffp-contract=off: a fused multiply-subtract would round differently from Megatron-LM.
#include "blend_order.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "vector_clones.h"

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kFew = 24; // up to here comparing all is faster than keeping blocks

struct Lead {
    double most;    // the largest lag
    double dataset; // the lowest dataset that has it
};

// Among members with these weights and counts; `size` is a multiple of kBlock.
MEGALITE_VECTOR Lead largest_lag(const double *weight, const double *given, const double *dataset, int64_t size, double progress) {
    double most = -kInfinity, first = kInfinity;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < size; ++i) {
        const double lag = weight[i] * progress - given[i];
        most = lag > most ? lag : most;
    }
#pragma omp simd reduction(min : first)
    for (int64_t i = 0; i < size; ++i) {
        const double candidate = weight[i] * progress - given[i] == most ? dataset[i] : kInfinity;
        first = candidate < first ? candidate : first;
    }
    return {most, first};
}

struct Margins {
    double above, below; // the largest lags among members with more weight than the leader, and with less
};

MEGALITE_VECTOR Margins margins(const double *weight, const double *given, double own, double progress) {
    double above = -kInfinity, below = -kInfinity;
#pragma omp simd reduction(max : above, below)
    for (int64_t i = 0; i < BlendOrder::kBlock; ++i) {
        const double lag = weight[i] * progress - given[i];
        const double heavier = weight[i] > own ? lag : -kInfinity, lighter = weight[i] < own ? lag : -kInfinity;
        above = heavier > above ? heavier : above;
        below = lighter > below ? lighter : below;
    }
    return {above, below};
}

} // namespace

BlendOrder::BlendOrder(const double *weights, int64_t datasets)
    : counts_(static_cast<size_t>(datasets), 0), member_of_(static_cast<size_t>(datasets)) {
    std::vector<int64_t> order(static_cast<size_t>(datasets));
    std::iota(order.begin(), order.end(), 0);
    if (datasets > kFew)
        std::stable_sort(order.begin(), order.end(), [weights](int64_t a, int64_t b) { return weights[a] > weights[b]; });
    for (const int64_t dataset : order) {
        member_of_[static_cast<size_t>(dataset)] = static_cast<int64_t>(weight_.size());
        weight_.push_back(weights[dataset]);
        given_.push_back(0.0);
        dataset_.push_back(static_cast<double>(dataset));
    }
    if (datasets <= kFew) return;
    while (weight_.size() % kBlock != 0) {
        weight_.push_back(0.0);
        given_.push_back(kInfinity);
        dataset_.push_back(kInfinity);
    }
    const size_t blocks = weight_.size() / kBlock, padded = (blocks + kBlock - 1) / kBlock * kBlock;
    leader_weight_.assign(padded, 0.0);
    leader_given_.assign(padded, kInfinity);
    leader_dataset_.assign(padded, kInfinity);
    valid_until_.assign(blocks, 0);
}

int64_t BlendOrder::next() {
    const int64_t dataset = valid_until_.empty() ? next_of_few() : next_leader();
    const size_t member = static_cast<size_t>(member_of_[static_cast<size_t>(dataset)]);
    given_[member] = static_cast<double>(++counts_[static_cast<size_t>(dataset)]);
    ++sample_;
    return dataset;
}

int64_t BlendOrder::next_of_few() const {
    const double progress = std::max(static_cast<double>(sample_), 1.0);
    double most = -kInfinity;
    size_t chosen = 0;
    for (size_t i = 0; i < weight_.size(); ++i) {
        const double lag = weight_[i] * progress - given_[i];
        if (lag > most) {
            most = lag;
            chosen = i;
        }
    }
    return static_cast<int64_t>(chosen); // few datasets are not reordered
}

int64_t BlendOrder::next_leader() {
    const double progress = std::max(static_cast<double>(sample_), 1.0);
    if (stale_ >= 0) {
        find_leader(static_cast<size_t>(stale_), progress);
        next_search_ = std::min(next_search_, valid_until_[static_cast<size_t>(stale_)]);
    }
    if (sample_ >= next_search_) {
        next_search_ = std::numeric_limits<int64_t>::max();
        for (size_t block = 0; block < valid_until_.size(); ++block) {
            if (sample_ >= valid_until_[block]) find_leader(block, progress);
            next_search_ = std::min(next_search_, valid_until_[block]);
        }
    }
    const double *weight = leader_weight_.data(), *given = leader_given_.data(), *dataset = leader_dataset_.data();
    const Lead lead = largest_lag(weight, given, dataset, static_cast<int64_t>(leader_weight_.size()), progress);
    const int64_t chosen = static_cast<int64_t>(lead.dataset);
    stale_ = member_of_[static_cast<size_t>(chosen)] / kBlock;
    return chosen;
}

void BlendOrder::find_leader(size_t block, double progress) {
    const double *weight = weight_.data() + block * kBlock, *given = given_.data() + block * kBlock;
    const double *dataset = dataset_.data() + block * kBlock;
    const Lead lead = largest_lag(weight, given, dataset, kBlock, progress);
    if (lead.most == -kInfinity) { // all retired
        leader_given_[block] = leader_dataset_[block] = kInfinity;
        valid_until_[block] = std::numeric_limits<int64_t>::max();
        return;
    }
    const size_t leader = static_cast<size_t>(member_of_[static_cast<size_t>(lead.dataset)]);
    leader_weight_[block] = weight_[leader];
    leader_given_[block] = given_[leader];
    leader_dataset_[block] = lead.dataset;

    // Members with more weight than the leader may catch up, and the heaviest would do so first; those of equal weight keep
    // their distance exactly; those with less fall behind, but one within the rounding errors must be watched. The errors are
    // bounded for twice the present progress, so the promise is not made for longer than that.
    const double heaviest = weight[0], own = weight_[leader];
    const Margins others = margins(weight, given, own, progress);
    const double error = 16 * std::numeric_limits<double>::epsilon() * (heaviest * progress + 1);
    double steps = progress;
    if (others.above > -kInfinity) steps = std::min(steps, (lead.most - others.above - error) / (heaviest - own));
    if (lead.most - others.below <= error || !(steps > 1)) steps = 1;
    valid_until_[block] = sample_ + static_cast<int64_t>(steps);
}

void BlendOrder::retire(int64_t dataset) {
    const int64_t member = member_of_[static_cast<size_t>(dataset)];
    given_[static_cast<size_t>(member)] = kInfinity;
    if (!valid_until_.empty()) valid_until_[static_cast<size_t>(member / kBlock)] = next_search_ = 0;
}
