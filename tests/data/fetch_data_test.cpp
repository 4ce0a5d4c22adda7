#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data/fetch_data.hpp>

#include <chrono>
#include <map>
#include <stdexcept>
#include <stop_token>
#include <thread>

#include "support/error_of.hpp"
#include "support/scratch_folder.hpp"

namespace lockstep {
namespace fetch_data_test {

using testing::ElementsAre;
using testing::IsEmpty;

const std::filesystem::path debian_folder = "/usr/share/datasets/fashion-mnist";
constexpr auto t10k_images = "t10k-images-idx3-ubyte.gz";
constexpr auto t10k_labels = "t10k-labels-idx1-ubyte.gz";
constexpr auto train_images = "train-images-idx3-ubyte.gz";
constexpr auto train_labels = "train-labels-idx1-ubyte.gz";

// A gzip file as the data set's authors published it: Debian's package has the same compressed data, but its gzip
// headers are without the file's name and the authors' time of compression.
std::string official(const std::string& debian_bytes, const std::string& gz_name, uint32_t time) {
  std::string header("\x1f\x8b\x08\x08", 4);
  for (int shift = 0; shift < 32; shift += 8) header += static_cast<char>(time >> shift & 0xff);
  header += std::string("\0\x03", 2) + gz_name.substr(0, gz_name.size() - 3) + '\0';
  return header + debian_bytes.substr(10);
}

// Tests over a folder with the four files as they can be downloaded.
class FetchDataTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(debian_folder)) {
      GTEST_SKIP() << "needs Debian's package dataset-fashion-mnist in " << debian_folder;
    }
    publish(train_images, 1504176606);
    publish(train_labels, 1504176606);
    publish(t10k_images, 1504176627);
    publish(t10k_labels, 1504176627);
  }
  Caught fetch_error(const FetchOptions& options) {
    return error_of([&] { fetch_fashion_mnist(home_ / "data", options); });
  }
  std::string url() const { return "file://" + published_.path().string(); }

  ScratchFolder published_;
  ScratchFolder home_;

 private:
  void publish(const std::string& name, uint32_t time) {
    published_.write(name, official(whole_file(debian_folder / name), name, time));
  }
};

TEST_F(FetchDataTest, FetchesTheFourFiles) {
  std::map<std::string, int64_t> done, total;
  fetch_fashion_mnist(home_ / "new" / "folder",
                      {.base_urls = {url()}, .on_progress = [&](const FetchProgress& progress) {
                         EXPECT_GE(progress.done, done[progress.file]);
                         done[progress.file] = progress.done;
                         total[progress.file] = progress.total;
                       }});
  for (const char* name : {train_images, train_labels, t10k_images, t10k_labels}) {
    EXPECT_EQ(home_.read(std::filesystem::path("new/folder") / name), published_.read(name)) << name;
    EXPECT_EQ(done[name], static_cast<int64_t>(published_.read(name).size())) << name;
    EXPECT_EQ(total[name], done[name]) << name;
  }
  ImageData data = load_fashion_mnist(home_ / "new" / "folder");
  EXPECT_EQ(data.train.size(), 60000);
  EXPECT_EQ(data.test.size(), 10000);
}

TEST_F(FetchDataTest, KeepsWhatIsRightAndReplacesWhatIsNot) {
  fetch_fashion_mnist(home_ / "data", {.base_urls = {url()}});
  auto first_write = std::filesystem::last_write_time(home_ / "data" / train_images);
  home_.write("data/t10k-labels-idx1-ubyte.gz", "something else");
  for (const char* name : {train_images, train_labels, t10k_images}) std::filesystem::remove(published_ / name);
  int64_t reported = 0;
  fetch_fashion_mnist(home_ / "data", {.base_urls = {url()}, .on_progress = [&](const FetchProgress& progress) {
                                         if (progress.file == train_images) reported = progress.done;
                                       }});
  EXPECT_EQ(home_.read("data/t10k-labels-idx1-ubyte.gz"), published_.read(t10k_labels));
  EXPECT_EQ(std::filesystem::last_write_time(home_ / "data" / train_images), first_write);
  EXPECT_EQ(reported, static_cast<int64_t>(std::filesystem::file_size(home_ / "data" / train_images)));
}

TEST_F(FetchDataTest, RefusesAWrongChecksum) {
  std::string bytes = published_.read(train_labels);
  bytes[bytes.size() / 2] ^= 1;
  published_.write(train_labels, bytes);
  EXPECT_THAT(fetch_error({.base_urls = {url()}}), Fails(Error::machine));
  std::vector<std::string> left;
  for (const auto& entry : std::filesystem::directory_iterator(home_ / "data")) left.push_back(entry.path().filename());
  EXPECT_THAT(left, ElementsAre(train_images));  // the file before it, which was right
}

TEST_F(FetchDataTest, KeepsAnEarlierFileWhenTheNewOneIsWrong) {
  std::filesystem::create_directory(home_ / "data");
  home_.write(std::filesystem::path("data") / train_images, "earlier");
  published_.write(train_images, "not it");
  EXPECT_THAT(fetch_error({.base_urls = {url()}}), Fails(Error::machine));
  EXPECT_EQ(home_.read(std::filesystem::path("data") / train_images), "earlier");
}

TEST_F(FetchDataTest, TriesTheNextUrl) {
  fetch_fashion_mnist(home_ / "data", {.base_urls = {"file:///nowhere/", url() + "/"}});
  EXPECT_EQ(home_.read(std::filesystem::path("data") / t10k_images), published_.read(t10k_images));
}

TEST_F(FetchDataTest, PassesOnWhatTheCallbackThrows) {
  EXPECT_THROW(
      fetch_fashion_mnist(home_ / "data", {.base_urls = {url(), url()},
                                           .on_progress = [](const FetchProgress&) { throw std::out_of_range("x"); }}),
      std::out_of_range);
  EXPECT_TRUE(std::filesystem::is_empty(home_ / "data"));
}

TEST(FetchData, NamesEveryUrlThatFailed) {
  ScratchFolder home;
  EXPECT_THAT(error_of([&] {
                fetch_fashion_mnist(home / "data", {.base_urls = {"file:///nowhere", "gopher://somewhere/"}});
              }),
              Fails(Error::machine));
  EXPECT_TRUE(std::filesystem::is_empty(home / "data"));
}

TEST(FetchData, NamesAFolderThatCannotBeMade) {
  ScratchFolder home;
  home.write("file", "");
  EXPECT_THAT(error_of([&] { fetch_fashion_mnist(home / "file" / "data", {.base_urls = {"file:///nowhere"}}); }),
              Fails(Error::file));
}

// A web server on this machine that gives everybody the same answer; an empty one means that it never answers.
class Server {
 public:
  explicit Server(std::string answer)
      : answer_(std::move(answer)), socket_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    if (bind(socket_, generic, size) != 0 || listen(socket_, 8) != 0 || getsockname(socket_, generic, &size) != 0) {
      throw std::runtime_error("no server");
    }
    url_ = "http://127.0.0.1:" + std::to_string(ntohs(address.sin_port));
    thread_ = std::thread([this] { serve(); });
  }
  ~Server() {
    shutdown(socket_, SHUT_RDWR);
    thread_.join();
    close(socket_);
  }
  const std::string& url() const { return url_; }

 private:
  void serve() {
    std::vector<int> open;
    for (int client; (client = accept(socket_, nullptr, nullptr)) >= 0; open.push_back(client)) {
      if (answer_.empty()) continue;
      char request[4096];
      if (recv(client, request, sizeof request, 0) < 0) continue;
      send(client, answer_.data(), answer_.size(), MSG_NOSIGNAL);
      shutdown(client, SHUT_WR);
    }
    for (int client : open) close(client);
  }
  std::string answer_;
  int socket_;
  std::string url_;
  std::thread thread_;
};

// A proxy in the environment must not stand between a test and its server.
class FetchOverHttpTest : public testing::Test {
 protected:
  void SetUp() override { setenv("no_proxy", "127.0.0.1", 1); }
  ScratchFolder home_;
};

TEST_F(FetchOverHttpTest, RefusesAnErrorPage) {
  Server server("HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnope");
  EXPECT_THAT(error_of([&] { fetch_fashion_mnist(home_.path(), {.base_urls = {server.url()}}); }),
              Fails(Error::machine));
  EXPECT_THAT(home_.names(), IsEmpty());
}

TEST_F(FetchOverHttpTest, RefusesAConnectionThatBreaksOff) {
  Server server("HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nonly this");
  EXPECT_THAT(error_of([&] { fetch_fashion_mnist(home_.path(), {.base_urls = {server.url()}}); }),
              Fails(Error::machine));
  EXPECT_THAT(home_.names(), IsEmpty());
}

TEST_F(FetchOverHttpTest, DoesNotFollowARedirectionToAFile) {
  home_.write("secret", "x");
  Server server("HTTP/1.1 302 Found\r\nLocation: file://" + (home_ / "secret").string() +
                "\r\nContent-Length: 0\r\n\r\n");
  EXPECT_THAT(error_of([&] { fetch_fashion_mnist(home_.path(), {.base_urls = {server.url()}}); }),
              Fails(Error::machine));
}

TEST_F(FetchOverHttpTest, StopsWhenAskedTo) {
  Server server("");
  std::stop_source stop;
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    stop.request_stop();
  });
  auto start = std::chrono::steady_clock::now();
  auto error = error_of([&] {
    fetch_fashion_mnist(home_.path(), {.base_urls = {server.url(), server.url()}, .stop = stop.get_token()});
  });
  later.join();
  EXPECT_THAT(error, Fails(Error::stopped));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));  // libcurl itself would wait for 30
  EXPECT_THAT(home_.names(), IsEmpty());
}

}  // namespace fetch_data_test
}  // namespace lockstep
